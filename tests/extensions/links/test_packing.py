"""Packed tensors are smaller, arrive bit for bit, and damaged ones are refused before anything is
allocated."""

from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from digenrl.extensions.links.packing import PACKED, packed, unpacked
from digenrl.transport.wire import DTYPES, Message, MessageKind, WireError, decode
from tests.transport.test_wire import LIMIT, messages, reader, written

ODD = {
    "latents": torch.randn(3, 5, 16, 7, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "long": torch.randn((1 << 18) + 3, generator=torch.Generator().manual_seed(1)).half(),
    "delta": torch.zeros(1 << 16, dtype=torch.uint8).index_fill_(0, torch.tensor([7, 4096]), 255),
    "odd": torch.arange(2051, dtype=torch.int32).to(torch.uint8),
    "small": torch.ones(3),
    "none": torch.zeros(0, 4),
}
"""More than a piece, not a multiple of four bytes, nothing, and a tensor that does not shrink."""


def passed(message: Message) -> Message:
    """The message after it was packed, written, read and unpacked."""
    return unpacked(decode(reader(written(packed(message))), LIMIT))


def test_packed_tensors_are_smaller_and_arrive_bit_for_bit() -> None:
    whole, small = (
        Message(MessageKind.CELLS, {"a": 1}, ODD),
        Message(MessageKind.WEIGHTS, {}, {"delta": ODD["delta"]}),
    )
    found = passed(whole)
    assert (found.meta, list(found.tensors)) == ({"a": 1}, list(ODD))
    for name, tensor in ODD.items():
        assert (found.tensors[name].dtype, found.tensors[name].shape) == (
            tensor.dtype,
            tensor.shape,
        )
        assert torch.equal(found.tensors[name], tensor)
    assert len(written(packed(whole))) < 0.9 * len(written(whole))
    latents = Message(MessageKind.CELLS, {}, {"x": ODD["latents"].repeat(20, 1, 1, 1)})
    assert (
        0.6 < len(written(packed(latents))) / len(written(latents)) < 0.72
    )  # signs and exponents of 16 bit
    assert len(written(packed(small))) < 600
    assert passed(small).digest is None, "the digest of packed bytes is not that of the bucket"


@given(messages)
@settings(max_examples=50, deadline=None)
def test_any_message_arrives_as_it_was(message: Message) -> None:
    found = passed(message)
    assert (found.kind, dict(found.meta)) == (message.kind, dict(message.meta))
    assert list(found.tensors) == list(message.tensors)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in message.tensors.items())


def test_a_message_that_does_not_shrink_is_sent_as_it_is() -> None:
    message = Message(MessageKind.CELLS, {}, {"small": ODD["small"], "none": ODD["none"]})
    assert packed(message) is message


def test_a_damaged_packed_message_is_refused() -> None:
    good = written(packed(Message(MessageKind.CELLS, {}, {"x": ODD["latents"]})))
    for position in range(len(good) - 1000, len(good), 7):
        bad = bytearray(good)
        bad[position] ^= 1
        with pytest.raises(WireError):
            unpacked(decode(reader(bytes(bad)), LIMIT))


def squeezed(size: int) -> Tensor:
    return torch.frombuffer(bytearray(zlib.compress(bytes(size))), dtype=torch.uint8)


BYTE = DTYPES.index(torch.uint8)


@pytest.mark.parametrize(
    ("table", "tensor", "cause"),
    [
        ([], squeezed(32), "announced as"),
        ({"y": [BYTE, 32]}, squeezed(32), "'y' is announced"),
        ({"x": [len(DTYPES), 32]}, squeezed(32), "announced as"),
        ({"x": [BYTE, -1]}, squeezed(32), "announced as"),
        ({"x": [BYTE, *[1] * 9]}, squeezed(32), "announced as"),
        ({"x": [BYTE, LIMIT + 1]}, squeezed(32), "over the limit"),
        ({"x": [BYTE, 2**40, 2**40]}, squeezed(32), "over the limit"),
        ({"x": [BYTE, 4]}, squeezed(32), "no less"),
        ({"x": [BYTE, 64]}, torch.ones(8), "no less"),
        ({"x": [BYTE, 32]}, torch.tensor([120, 121, 122], dtype=torch.uint8), "damaged"),
        ({"x": [BYTE, 32]}, squeezed(33), "32 bytes or more"),
        ({"x": [BYTE, 32]}, squeezed(31), "31 bytes or more"),
    ],
)
def test_each_impossible_announcement_is_refused_by_name(
    table: object, tensor: Tensor, cause: str
) -> None:
    with pytest.raises(WireError, match=cause):
        unpacked(Message(MessageKind.CELLS, {PACKED: table}, {"x": tensor}), LIMIT)
