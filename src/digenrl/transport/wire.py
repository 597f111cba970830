"""Messages between ranks: a fixed, checked header and raw tensor bytes. No pickle, nothing
executable.

A message on the wire has four parts. The numbers of head and table are big-endian:

    b"DGRL" | kind u16 | meta length u32 | tensor count u16
    meta: a UTF-8 JSON object of plain values
    a table with one row per tensor: dtype code u8 | dims u8 | 8 x u64 (unused dimensions 0)
    the raw bytes of all tensors

The receiver knows every size before it allocates, and refuses what is over its limits.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import torch
import xxhash
from torch import Tensor

from digenrl import accelerator

MAGIC = b"DGRL"
_HEAD = struct.Struct("!4sHIH")  # magic, kind, bytes of meta, number of tensors
MAX_DIMS = 8
_ROW = struct.Struct(f"!BB{MAX_DIMS}Q")  # dtype code, number of dimensions, sizes
DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_PIECE = 1 << 20  # bytes that are read and hashed while they are in the cache
_MAPPED = 32 << 20
"""Bytes from which glibc maps memory anew each time (`cluster.launcher.keep_memory`)."""
MAX_META_BYTES = 16 << 20
MAX_TENSORS = 4096


class MessageKind(IntEnum):
    """Type of a message."""

    CELLS = 1
    WEIGHTS = 2
    STATE = 3
    ASK = 4
    """Request of a rank that joined for the weights in use."""
    EVALUATION = 5
    """Piece of an evaluation: samples and scores."""


class WireError(ConnectionError):
    """The peer sent bytes that are not a digenrl message within the limits."""


@dataclass(frozen=True)
class Message:
    """One message: `meta` of plain JSON values, and tensors by name (the names are sent with the
    meta)."""

    kind: MessageKind
    meta: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    digest: str | None = None
    """xxh3 over all tensor bytes of a received WEIGHTS message, computed while each piece was still
    in the cache."""


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the raw bytes of a contiguous CPU tensor, without a copy."""
    if not tensor.numel():
        return memoryview(b"")
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def empty_bytes(size: int, pin: bool) -> Tensor:
    """Return [size] uint8 in CPU memory, whose values are not set.

    What is mapped anew is filled several times as fast in large pages, where the system grants them
    (/sys/kernel/mm/transparent_hugepage/enabled: always or madvise).
    """
    if pin or size < _MAPPED or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8, pin_memory=pin)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


Buffers = list[memoryview]
"""Pieces of a message that are written to the socket one after the other."""


def on_host(message: Message) -> Message:
    """Return the message with contiguous tensors in CPU memory. Tensors that are so already are not
    copied."""
    tensors = {
        name: tensor.detach().to("cpu").contiguous() for name, tensor in message.tensors.items()
    }
    return replace(message, tensors=tensors)


def encode(message: Message) -> Buffers:
    """Return the buffers to put on the wire, in order; the bytes of contiguous CPU tensors are not
    copied.

    Example:
        >>> message = Message(MessageKind.CELLS, {"step": 3}, {"x": torch.ones(2, 3)})
        >>> [buffer.nbytes for buffer in encode(message)]  # 12 + 33 of meta + a row of 66; 6 * 4
        [111, 24]
    """
    names = list(message.tensors)
    meta = json.dumps({"names": names, "meta": dict(message.meta)}, separators=(",", ":")).encode()
    if len(meta) > MAX_META_BYTES or len(names) > MAX_TENSORS:
        raise WireError(
            f"message of kind {message.kind.name} is too large: {len(meta)} bytes of meta, "
            f"{len(names)} tensors."
        )
    head = bytearray(_HEAD.pack(MAGIC, message.kind, len(meta), len(names)) + meta)
    raw: list[memoryview] = []
    for name in names:
        tensor = message.tensors[name].detach().to("cpu").contiguous()
        if tensor.dtype not in _CODES or tensor.dim() > MAX_DIMS:
            raise WireError(
                f"tensor {name!r} has dtype {tensor.dtype} and {tensor.dim()} dimensions; the wire "
                f"carries {', '.join(map(str, DTYPES))} of at most {MAX_DIMS}."
            )
        head += _ROW.pack(
            _CODES[tensor.dtype], tensor.dim(), *tensor.shape, *(0,) * (MAX_DIMS - tensor.dim())
        )
        raw.append(tensor_bytes(tensor))
    return [memoryview(head), *raw]


def decode(read: Callable[[memoryview], None], max_bytes: int) -> Message:
    """Read and return the next message.

    Args:
        read: fills a buffer completely, or raises.
        max_bytes: bound for the sum of all tensors. An empty dimension counts as one.

    Raises:
        WireError: wrong magic, unknown kind or dtype, sizes over the limits, or meta that is not
            the agreed JSON.
    """

    def take_bytes(size: int) -> bytearray:
        buffer = bytearray(size)
        read(memoryview(buffer))
        return buffer

    max_count = min(MAX_TENSORS, max_bytes)  # each counts at least a byte
    # `number in MessageKind` raises before Python 3.12, so the check below asks the mapping.
    magic, kind, meta_size, count = _HEAD.unpack(take_bytes(_HEAD.size))
    if (
        magic != MAGIC
        or kind not in MessageKind._value2member_map_
        or meta_size > MAX_META_BYTES
        or count > max_count
    ):
        raise WireError(
            f"not a digenrl message: magic {magic!r}, kind {kind}, meta {meta_size} bytes, {count} "
            "tensors."
        )
    try:
        body = json.loads(take_bytes(meta_size))
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
    layout = _read_layout(names, take_bytes(_ROW.size * count), max_bytes)
    hasher = xxhash.xxh3_64() if kind == MessageKind.WEIGHTS else None
    tensors: dict[str, Tensor] = {}
    # Pinned, because weights go on to the device.
    pin = kind == MessageKind.WEIGHTS and accelerator.device_kind() != "cpu"
    for name, (dtype, shape) in zip(names, layout, strict=True):
        room = empty_bytes(math.prod(shape) * dtype.itemsize, pin)
        tensors[name], raw = room.view(dtype).view(shape), tensor_bytes(room)
        piece = _PIECE if hasher is not None else max(1, len(raw))
        for start in range(0, len(raw), piece):
            read(raw[start : start + piece])
            if hasher is not None:
                hasher.update(raw[start : start + piece])
    return Message(
        MessageKind(kind), meta, tensors, hasher.hexdigest() if hasher is not None else None
    )


def _read_layout(
    names: Sequence[str], rows: bytearray, max_bytes: int
) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of every tensor of a message, as its table announces them.

    Raises:
        WireError: a row is not a tensor's, or the tensors are larger than `max_bytes` together.
    """
    layout: list[tuple[torch.dtype, tuple[int, ...]]] = []
    total = 0
    for name, (code, dims, *sizes) in zip(names, _ROW.iter_unpack(rows), strict=True):
        if code >= len(DTYPES) or dims > MAX_DIMS:
            raise WireError(f"tensor {name!r}: dtype code {code}, {dims} dimensions.")
        shape = tuple(sizes[:dims])
        total += math.prod(max(1, size) for size in shape) * DTYPES[code].itemsize
        if total > max_bytes:
            raise WireError(
                f"message of {total} bytes at tensor {name!r} {shape}: the limit is {max_bytes} "
                "bytes."
            )
        layout.append((DTYPES[code], shape))
    return layout
