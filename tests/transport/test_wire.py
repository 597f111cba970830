"""Messages: what is sent arrives bit for bit, and nothing else is accepted."""

from __future__ import annotations

import io
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from digenrl.transport import wire
from digenrl.transport.wire import (
    DTYPES,
    MAGIC,
    MAX_META_BYTES,
    MAX_TENSORS,
    Message,
    MessageKind,
    WireError,
    decode,
    empty_bytes,
    encode,
    tensor_bytes,
)

LIMIT = 1 << 20


def reader(data: bytes) -> Callable[[memoryview], None]:
    stream = io.BytesIO(data)

    def read(buffer: memoryview) -> None:
        if stream.readinto(buffer) != len(buffer):
            raise EOFError("end of data")

    return read


def written(message: Message) -> bytes:
    return b"".join(bytes(buffer) for buffer in encode(message))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    raw = draw(st.integers(0, 2**32))
    values = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(raw))
    tensor = (values > 0) if dtype is torch.bool else values.to(dtype)
    return tensor.transpose(0, -1) if draw(st.booleans()) and len(shape) > 1 else tensor


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
messages = st.builds(
    Message,
    st.sampled_from(list(MessageKind)),
    st.dictionaries(st.text(max_size=6), plain, max_size=4),
    st.dictionaries(st.text(max_size=8), tensors(), max_size=4),
)


@given(messages)
@settings(max_examples=150, deadline=None)
def test_round_trip(message: Message) -> None:
    data = written(message)
    found = decode(reader(data), LIMIT)
    assert (found.kind, dict(found.meta)) == (message.kind, dict(message.meta))
    assert list(found.tensors) == list(message.tensors)
    for name, tensor in message.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert found.tensors[name].shape == tensor.shape
        assert torch.equal(found.tensors[name], tensor)


@given(messages, st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_or_cut_message_never_does_harm(message: Message, data: st.DataObject) -> None:
    """Any change of any byte gives another message within the limits, WireError or the end of data;
    nothing else."""
    good = bytearray(written(message))
    position = data.draw(st.integers(0, len(good) - 1))
    good[position] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(good)))
    for bad in (bytes(good), bytes(good[:cut])):
        try:
            found = decode(reader(bad), LIMIT)
        except (WireError, EOFError):
            continue
        assert sum(t.numel() * t.element_size() for t in found.tensors.values()) <= LIMIT


@given(st.binary(max_size=200))
@settings(max_examples=150, deadline=None)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises((WireError, EOFError)):
        decode(reader(data), LIMIT)


def raw(
    meta: bytes, count: int = 0, magic: bytes = MAGIC, kind: int = 2, size: int | None = None
) -> bytes:
    return struct.pack("!4sHIH", magic, kind, len(meta) if size is None else size, count) + meta


def row(code: int, dims: int, *shape: int) -> bytes:
    return struct.pack("!BB8Q", code, dims, *shape, *(0,) * (8 - len(shape)))


def announced(names: object, meta: object = None) -> bytes:
    return json.dumps({"names": names, "meta": {} if meta is None else meta}).encode()


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (raw(announced([]), magic=b"HTTP"), "magic b'HTTP'"),
        (raw(announced([]), kind=99), "kind 99"),
        (raw(b"", size=MAX_META_BYTES + 1), "meta"),
        (raw(announced([]), count=MAX_TENSORS + 1), f"{MAX_TENSORS + 1} tensors"),
        (raw(b"{" * 10), "not the agreed JSON"),
        (raw(b"\xff\xfe\x00"), "not the agreed JSON"),
        (raw(b'{"names": ' + b"[" * 20000), "not the agreed JSON"),
        (raw(b"[]"), "not the agreed JSON"),
        (raw(announced("ab"), count=2), "announces"),
        (raw(announced(["a", "a"]), count=2), "announces"),
        (raw(announced(["a"]), count=2), "announces"),
        (raw(announced([1]), count=1), "announces"),
        (raw(announced([], meta=[])), "announces"),
        (raw(announced(["x"]), count=1) + row(len(DTYPES), 0), "dtype code"),
        (raw(announced(["x"]), count=1) + row(0, 9), "9 dimensions"),
        (raw(announced(["x"]), count=1) + row(0, 1, LIMIT), "limit"),
        (raw(announced(["x"]), count=1) + row(0, 2, 0, 2**63), "limit"),
        (raw(announced(["x"]), count=1) + row(0, 3, 2**40, 2**40, 2**40), "limit"),
        (raw(announced(["x", "y"]), count=2) + row(0, 1, 8) + row(0, 1, LIMIT // 4), "'y'"),
    ],
)
def test_each_violation_is_refused_by_name_before_anything_is_allocated(
    data: bytes, cause: str
) -> None:
    with pytest.raises(WireError, match=cause):
        decode(reader(data), LIMIT)


def test_a_message_may_have_as_many_bytes_and_dimensions_as_the_limit() -> None:
    deep = Message(MessageKind.CELLS, {}, {"x": torch.zeros((1,) * 7 + (3,))})
    assert decode(reader(written(deep)), LIMIT).tensors["x"].shape == (1,) * 7 + (3,)
    decode(reader(raw(announced([]) + b" " * (MAX_META_BYTES - len(announced([]))))), 1)
    many = announced([str(i) for i in range(MAX_TENSORS)])
    rows = row(6, 1, 1) * MAX_TENSORS
    assert len(decode(reader(raw(many, MAX_TENSORS) + rows + b"7" * MAX_TENSORS), LIMIT).tensors)
    data = written(Message(MessageKind.CELLS, {}, {"x": torch.zeros(1, 64, 1, dtype=torch.uint8)}))
    assert decode(reader(data), 64).tensors["x"].numel() == 64
    with pytest.raises(WireError, match="the limit is 63 bytes"):
        decode(reader(data), 63)
    encode(Message(MessageKind.CELLS, {}, {str(i): torch.zeros(1) for i in range(MAX_TENSORS)}))
    said = "a" * (MAX_META_BYTES - len(b'{"names":[],"meta":{"said":""}}'))
    assert len(written(Message(MessageKind.CELLS, {"said": said}, {}))) > MAX_META_BYTES
    with pytest.raises(WireError, match="too large"):
        encode(Message(MessageKind.CELLS, {"said": f"{said}a"}, {}))


def test_what_cannot_travel_fails_in_its_authors_stack() -> None:
    with pytest.raises(WireError, match=r"'x' has dtype torch\.complex64"):
        encode(Message(MessageKind.CELLS, {}, {"x": torch.zeros(2, dtype=torch.complex64)}))
    with pytest.raises(WireError, match=r"'x' has dtype .* and 9 dimensions"):
        encode(Message(MessageKind.CELLS, {}, {"x": torch.zeros((1,) * 9)}))
    with pytest.raises(TypeError):
        encode(Message(MessageKind.CELLS, {"x": object()}))
    with pytest.raises(WireError, match="too large"):
        encode(
            Message(MessageKind.CELLS, {}, {str(i): torch.zeros(1) for i in range(MAX_TENSORS + 1)})
        )


def test_the_bytes_of_a_message_are_those_of_every_version_of_this_program() -> None:
    """A rank that joins may run a version that was built elsewhere."""
    numbers = {"CELLS": 1, "WEIGHTS": 2, "STATE": 3, "ASK": 4, "EVALUATION": 5}
    assert {kind.name: int(kind) for kind in MessageKind} == numbers
    dtypes = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool"]
    tensors = {name: torch.ones(2, 1).to(getattr(torch, name)) for name in dtypes}
    meta = json.dumps({"names": dtypes, "meta": {"a": [1, None]}}, separators=(",", ":")).encode()
    rows = b"".join(struct.pack("!BB8Q", code, 2, 2, 1, *[0] * 6) for code in range(len(dtypes)))
    head = struct.pack("!4sHIH", b"DGRL", 5, len(meta), 8)
    raw = b"".join(bytes(tensor_bytes(tensor)) for tensor in tensors.values())
    made = b"".join(encode(Message(MessageKind.EVALUATION, {"a": [1, None]}, tensors)))
    assert made == head + meta + rows + raw


def test_weights_alone_are_digested_piece_by_piece_and_pinned_for_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "_PIECE", 5)
    tensors = {"x": torch.arange(3.0), "empty": torch.zeros(0), "y": torch.arange(2.0)}
    for kind in (MessageKind.WEIGHTS, MessageKind.CELLS):
        sizes: list[int] = []
        take = reader(b"".join(encode(Message(kind, {}, tensors))))

        def read(buffer: memoryview, take: Any = take, sizes: list[int] = sizes) -> None:
            sizes.append(len(buffer))
            take(buffer)

        found = decode(read, 1 << 20)
        assert all(torch.equal(found.tensors[name], each) for name, each in tensors.items())
        whole = kind is MessageKind.CELLS
        assert sizes[3:] == ([12, 8] if whole else [5, 5, 2, 5, 3])
        raw = b"".join(bytes(tensor_bytes(each)) for each in tensors.values())
        assert found.digest == (None if whole else xxhash.xxh3_64_hexdigest(raw))
    pinned: list[bool] = []
    plain = torch.empty

    def empty(*shape: Any, pin_memory: bool, **how: Any) -> Tensor:
        pinned.append(pin_memory)
        return plain(*shape, **how)

    monkeypatch.setattr(torch, "empty", empty)
    for device, kind in (
        ("cuda", MessageKind.WEIGHTS),
        ("cuda", MessageKind.CELLS),
        ("cpu", MessageKind.WEIGHTS),
    ):
        monkeypatch.setattr(wire.accelerator, "device_kind", lambda device=device: device)
        decode(reader(b"".join(encode(Message(kind, {}, {"x": torch.ones(1)})))), 1 << 20)
    assert pinned == [True, False, False]


def flags_at(address: int) -> set[str]:
    """The kernel's flags of this process's mapping that holds `address`."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if re.fullmatch(r"[0-9a-f]+-[0-9a-f]+", words[0]):
            first, last = (int(word, 16) for word in words[0].split("-"))
            inside = first <= address < last
        elif inside and words[0] == "VmFlags:":
            return set(words[1:])
    raise AssertionError(f"no mapping has {address:x}")


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="no kernel with large pages"
)
def test_what_is_mapped_anew_asks_for_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_MAPPED", 4 << 20)
    sent = Message(MessageKind.WEIGHTS, {}, {"a": torch.arange(1 << 20), "b": torch.ones(3)})
    arrived = decode(reader(written(sent)), 1 << 30)
    assert all(torch.equal(arrived.tensors[name], value) for name, value in sent.tensors.items())
    assert "hg" in flags_at(arrived.tensors["a"].data_ptr())
    assert "hg" in flags_at(empty_bytes(4 << 20, pin=False).data_ptr())
