"""Messages between ranks: a fixed, checked header and raw tensor bytes. No pickle, nothing executable.

A message on the wire is
    b"DGRL" | kind u16 | meta length u32 | tensor count u16 | meta (UTF-8 JSON object of plain values)
    then a table with one row per tensor: dtype code u8 | dims u8 | packed u64 | 8 x u64 (unused dimensions 0)
    then the bytes of all tensors: raw, or (packed > 0) so many bytes of zlib.
The receiver knows every size before it allocates, and refuses what is over its limits.

Packing loses nothing. The bytes of floats are sorted by their place in the float first: signs and exponents are much
alike, so that latents of 16 bit become two thirds; runs of zeros, as of what has not changed, become next to nothing.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

MAGIC = b"DGRL"
_HEAD = struct.Struct("!4sHIH")
MAX_DIMS = 8
_ROW = struct.Struct(f"!BBQ{MAX_DIMS}Q")
_DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_PIECE = 1 << 20
_PLANES = 4
"""Bytes that are sorted by their place: those of one fp32 value, or of two of 16 bit."""
_WORTH_PACKING = 1 << 10
"""Bytes of a tensor; of a smaller one the header counts as much."""
MAX_META_BYTES = 16 << 20
MAX_TENSORS = 4096


class Kind(IntEnum):
    """What a message is about."""

    CELLS = 1
    WEIGHTS = 2
    STATE = 3
    ASK = 4
    """A rank that joined asks for the weights in use."""
    EVALUATION = 5
    """A piece of an evaluation: samples and scores."""
    BASE_MEANS = 7
    """Of some cells, the means that the base model gives: in a record, never on the way."""


class WireError(ConnectionError):
    """The peer sent something that is not a digenrl message within the limits."""


@dataclass(frozen=True)
class Message:
    """One message: JSON-plain `meta`, and tensors by name (names travel in the meta)."""

    kind: Kind
    meta: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    digest: str | None = None
    """xxh3 over all tensor bytes of a received WEIGHTS message, taken while each piece was still in the cache."""


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The raw bytes of a contiguous CPU tensor, without a copy."""
    if not tensor.numel():
        return memoryview(b"")
    return tensor.reshape(-1).view(torch.uint8).numpy().data


Buffers = list[memoryview]


def encode(message: Message) -> Buffers:
    """The buffers to put on the wire, in order; the bytes of contiguous CPU tensors are not copied."""
    names = list(message.tensors)
    meta = json.dumps({"names": names, "meta": dict(message.meta)}, separators=(",", ":")).encode()
    if len(meta) > MAX_META_BYTES or len(names) > MAX_TENSORS:
        raise WireError(
            f"message of kind {message.kind.name} is too large: {len(meta)} bytes of meta, {len(names)} tensors."
        )
    head = bytearray(_HEAD.pack(MAGIC, message.kind, len(meta), len(names)) + meta)
    raw: list[memoryview] = []
    for name in names:
        tensor = message.tensors[name].detach().to("cpu").contiguous()
        if tensor.dtype not in _CODES or tensor.dim() > MAX_DIMS:
            raise WireError(
                f"tensor {name!r} has dtype {tensor.dtype} and {tensor.dim()} dimensions; the wire carries "
                f"{', '.join(map(str, _DTYPES))} of at most {MAX_DIMS}."
            )
        head += _ROW.pack(_CODES[tensor.dtype], tensor.dim(), 0, *tensor.shape, *(0,) * (MAX_DIMS - tensor.dim()))
        raw.append(tensor_bytes(tensor))
    return [memoryview(head), *raw]


def packed(buffers: Buffers) -> Buffers:
    """What `encode` gave, with the tensors packed that become smaller by it."""
    head, sent = bytearray(buffers[0]), list[memoryview]()
    row = len(head) - _ROW.size * (len(buffers) - 1)
    for raw in buffers[1:]:
        small = _pack(raw) if len(raw) >= _WORTH_PACKING else b""
        if small and len(small) < len(raw):
            struct.pack_into("!Q", head, row + 2, len(small))
            raw = memoryview(small)
        sent.append(raw)
        row += _ROW.size
    return [memoryview(head), *sent]


def _pack(raw: memoryview) -> bytes:
    packer = zlib.compressobj(1, strategy=zlib.Z_RLE)  # floats repeat no strings: looking for some would take most time
    pieces = [packer.compress(_sorted(raw[start : start + _PIECE])) for start in range(0, len(raw), _PIECE)]
    return b"".join([*pieces, packer.flush()])


def _unpack(small: bytearray, raw: memoryview) -> None:
    """Fill `raw` with what `_pack` made `small` of.

    Raises:
        WireError: it is something else, or has another size.
    """
    try:
        reader = zlib.decompressobj()
        data = reader.decompress(small, len(raw))
        whole = len(data) == len(raw) and not reader.decompress(reader.unconsumed_tail, 1) and reader.eof
    except zlib.error as error:
        raise WireError(f"packed bytes of a tensor are damaged: {error}.") from error
    if not whole:
        raise WireError(f"packed bytes of a tensor give {len(data)} bytes or more, announced were {len(raw)}.")
    for start in range(0, len(raw), _PIECE):
        piece = np.frombuffer(data, np.uint8, min(_PIECE, len(raw) - start), start)
        place = np.frombuffer(raw[start : start + _PIECE], np.uint8)
        even = len(piece) // _PLANES * _PLANES
        place[:even].reshape(-1, _PLANES)[:] = piece[:even].reshape(_PLANES, -1).T
        place[even:] = piece[even:]


def _sorted(piece: memoryview) -> bytes:
    """First bytes of all values, then their second ones, ..., then what is left over."""
    even = len(piece) // _PLANES * _PLANES
    return np.frombuffer(piece[:even], np.uint8).reshape(-1, _PLANES).T.tobytes() + bytes(piece[even:])


def decode(read: Callable[[memoryview], None], max_bytes: int) -> Message:
    """The next message. `read` fills a buffer completely or raises; `max_bytes` bounds the sum of all tensors, an empty
    dimension counted as one.

    Raises:
        WireError: wrong magic, unknown kind or dtype, sizes over the limits, or meta that is not the agreed JSON.
    """

    def take(size: int) -> bytearray:
        buffer = bytearray(size)
        read(memoryview(buffer))
        return buffer

    max_count = min(MAX_TENSORS, max_bytes)  # each counts at least a byte
    magic, kind, meta_size, count = _HEAD.unpack(take(_HEAD.size))
    if magic != MAGIC or kind not in Kind._value2member_map_ or meta_size > MAX_META_BYTES or count > max_count:
        raise WireError(
            f"not a digenrl message: magic {magic!r}, kind {kind}, meta {meta_size} bytes, {count} tensors."
        )
    try:
        body = json.loads(take(meta_size))
        names, meta = body["names"], body["meta"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"message meta is not the agreed JSON: {error}.") from error
    if not (
        isinstance(meta, dict)
        and isinstance(names, list)
        and all(isinstance(n, str) for n in names)
        and len(names) == len(set(names)) == count
    ):
        raise WireError(f"message meta announces {names!r} for {count} tensors.")
    layout = _layout(names, take(_ROW.size * count), max_bytes)
    hasher = xxhash.xxh3_64() if kind == Kind.WEIGHTS else None
    tensors: dict[str, Tensor] = {}
    pin = kind == Kind.WEIGHTS and torch.cuda.is_available()  # on their way to the GPU
    for name, (dtype, shape, small) in zip(names, layout, strict=True):
        tensors[name] = torch.empty(shape, dtype=dtype, pin_memory=pin)
        raw = tensor_bytes(tensors[name])
        if small:
            _unpack(take(small), raw)
        piece = _PIECE if hasher is not None else max(1, len(raw))
        for start in range(0, len(raw), piece):
            if not small:
                read(raw[start : start + piece])
            if hasher is not None:
                hasher.update(raw[start : start + piece])
    return Message(Kind(kind), meta, tensors, hasher.hexdigest() if hasher is not None else None)


def _layout(names: Sequence[str], rows: bytearray, max_bytes: int) -> list[tuple[torch.dtype, tuple[int, ...], int]]:
    """dtype and shape of every tensor of a message, as its table announces them, and the bytes that it is packed into
    (0: raw).

    Raises:
        WireError: a row is not a tensor's, or the tensors are larger than `max_bytes` together.
    """
    layout: list[tuple[torch.dtype, tuple[int, ...], int]] = []
    total = 0
    for name, (code, dims, small, *sizes) in zip(names, _ROW.iter_unpack(rows), strict=True):
        if code >= len(_DTYPES) or dims > MAX_DIMS:
            raise WireError(f"tensor {name!r}: dtype code {code}, {dims} dimensions.")
        shape = tuple(sizes[:dims])
        total += math.prod(max(1, size) for size in shape) * _DTYPES[code].itemsize
        if total > max_bytes:
            raise WireError(f"message of {total} bytes at tensor {name!r} {shape}: the limit is {max_bytes} bytes.")
        if small and small >= math.prod(shape) * _DTYPES[code].itemsize:
            raise WireError(f"tensor {name!r} {shape} is packed into {small} bytes, which is no less than it has.")
        layout.append((_DTYPES[code], shape, small))
    return layout
