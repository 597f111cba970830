"""Pack a message's tensors without loss: zlib over bytes that are sorted by their place in the
float.

Signs and exponents of neighbouring floats are similar, so 16-bit latents shrink to two thirds. Runs
of zeros, as in the delta of weights that hardly moved, shrink to almost nothing.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from digenrl import accelerator
from digenrl.transport.link import MAX_MESSAGE_BYTES
from digenrl.transport.wire import DTYPES, MAX_DIMS, Message, MessageKind, WireError, tensor_bytes

PACKED = "packed"
"""Key of a message's meta: name of each packed tensor -> [index of its dtype, *shape]."""
_PIECE = 1 << 20
_PLANES = 4
"""Bytes that are sorted by place together: those of one fp32 value, or of two 16-bit values."""
_WORTH_PACKING = 1 << 10
"""Bytes of the smallest tensor that is packed. For smaller tensors the header costs what packing
saves."""


def packed(message: Message) -> Message:
    """Return `message` with every tensor packed that shrinks; `message` itself where none does."""
    tensors, table = dict(message.tensors), {}
    for name, tensor in message.tensors.items():
        raw = tensor_bytes(tensor)
        if len(raw) >= _WORTH_PACKING and len(small := _pack(raw)) < len(raw):
            tensors[name] = torch.frombuffer(bytearray(small), dtype=torch.uint8)
            table[name] = [DTYPES.index(tensor.dtype), *tensor.shape]
    return (
        replace(message, meta={**message.meta, PACKED: table}, tensors=tensors)
        if table
        else message
    )


def unpacked(message: Message, limit: int = MAX_MESSAGE_BYTES) -> Message:
    """Return the message as it was before `packed`.

    Raises:
        WireError: the announced tensors are impossible, or larger than `limit` bytes in all, or do
            not match the packed bytes.
    """
    if PACKED not in message.meta:
        return message
    meta = dict(message.meta)
    whole = _announced(message, meta.pop(PACKED), limit)
    # They are on their way to the device.
    pin = message.kind is MessageKind.WEIGHTS and accelerator.kind() != "cpu"
    tensors = dict(message.tensors)
    for name, (dtype, shape) in whole.items():
        tensors[name] = torch.empty(shape, dtype=dtype, pin_memory=pin)
        _unpack(name, message.tensors[name], tensor_bytes(tensors[name]))
    return replace(message, meta=meta, tensors=tensors, digest=None)


def _announced(
    message: Message, table: Any, limit: int
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of every packed tensor of `message`, checked before anything is
    allocated."""
    whole: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, entry in table.items() if isinstance(table, Mapping) else [("", table)]:
        plain = isinstance(entry, list) and all(
            type(number) is int and number >= 0 for number in entry
        )
        if (
            not plain
            or not 0 < len(entry) <= 1 + MAX_DIMS
            or entry[0] >= len(DTYPES)
            or name not in message.tensors
        ):
            raise WireError(f"packed tensor {name!r} is announced as {entry!r}.")
        dtype, shape = DTYPES[entry[0]], tuple(entry[1:])
        size, small = math.prod(shape) * dtype.itemsize, message.tensors[name]
        limit -= size
        if limit < 0:
            raise WireError(f"packed tensor {name!r} {shape} is over the limit of a message.")
        if small.dtype != torch.uint8 or small.numel() >= size:
            raise WireError(
                f"tensor {name!r} {shape} is packed into {small.numel()} bytes, which is no less."
            )
        whole[name] = dtype, shape
    return whole


def _pack(raw: memoryview) -> bytes:
    packer = zlib.compressobj(
        1, strategy=zlib.Z_RLE
    )  # floats rarely repeat strings, and searching for them is slow
    pieces = [
        packer.compress(_sorted(raw[start : start + _PIECE]))
        for start in range(0, len(raw), _PIECE)
    ]
    return b"".join([*pieces, packer.flush()])


def _unpack(name: str, small: Tensor, raw: memoryview) -> None:
    """Fill `raw` with the bytes from which `_pack` made `small`."""
    try:
        reader = zlib.decompressobj()
        data = reader.decompress(tensor_bytes(small), len(raw))
        whole = (
            len(data) == len(raw)
            and not reader.decompress(reader.unconsumed_tail, 1)
            and reader.eof
        )
    except zlib.error as error:
        raise WireError(f"packed bytes of tensor {name!r} are damaged: {error}.") from error
    if not whole:
        raise WireError(
            f"packed tensor {name!r} gives {len(data)} bytes or more, announced were {len(raw)}."
        )
    for start in range(0, len(raw), _PIECE):
        piece = np.frombuffer(data, np.uint8, min(_PIECE, len(raw) - start), start)
        place = np.frombuffer(raw[start : start + _PIECE], np.uint8)
        even = len(piece) // _PLANES * _PLANES
        place[:even].reshape(-1, _PLANES)[:] = piece[:even].reshape(_PLANES, -1).T
        place[even:] = piece[even:]


def _sorted(piece: memoryview) -> bytes:
    """Return the first bytes of all values, then their second ones, ..., then the remainder."""
    even = len(piece) // _PLANES * _PLANES
    return np.frombuffer(piece[:even], np.uint8).reshape(-1, _PLANES).T.tobytes() + bytes(
        piece[even:]
    )
