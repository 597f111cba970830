"""The difference between two versions of some bytes, deflated, exact to the bit.

A word is two bytes: a value in 16 bit, or half of one in 32. After an update most 16-bit words of
the weights are as before, and the others differ in their low bits. So the difference is a bit for
each word (whether it moved), and the exclusive or of the words that moved, low bytes first. Example:
of 16-bit weights in which one value in twenty moved by one step, about a twentieth is left.
"""  # noqa: E501

from __future__ import annotations

import zlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from digenrl.transport.wire import empty_bytes, tensor_bytes

_LEVEL = 1


def encode_difference(data: Tensor, base: Tensor) -> tuple[Tensor, dict[str, int]]:
    """Return the bytes that turn `base` into `data`, and what `apply_difference` must know of them.

    Args:
        data, base: uint8 of one even length.

    Example:
        >>> base, data = torch.tensor([[5, 0, 7, 0, 9, 0], [5, 0, 6, 0, 9, 0]], dtype=torch.uint8)
        >>> payload, facts = encode_difference(data, base)
        >>> facts["moved"], apply_difference(payload, facts, base).tolist()  # one word of three
        (1, [5, 0, 6, 0, 9, 0])
    """
    words = _as_words(data) ^ _as_words(base)
    moved = words != 0
    # [2, moved]: all low bytes, then all high bytes, which zlib packs better than pairs.
    changes = words[moved].view(np.uint8).reshape(-1, 2).T
    parts = [zlib.compress(part.tobytes(), _LEVEL) for part in (np.packbits(moved), changes)]
    payload = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
    return payload, {"where": len(parts[0]), "moved": changes.shape[1]}


def apply_difference(payload: Tensor, facts: dict[str, int], base: Tensor) -> Tensor:
    """Invert `encode_difference`.

    Raises:
        ValueError, zlib.error: `payload` is no difference to bytes of this length.
    """
    raw, count = tensor_bytes(payload), len(base) // 2
    where = _inflate_bytes(raw[: facts["where"]], -(-count // 8))  # one bit a word
    changes = _inflate_bytes(raw[facts["where"] :], 2 * facts["moved"])
    moved = np.unpackbits(where, count=count).astype(bool)
    # Pinned as the base is: the bytes are on their way to the device.
    data = empty_bytes(len(base), base.is_pinned()).copy_(base)
    _as_words(data)[moved] ^= np.ascontiguousarray(changes.reshape(2, -1).T).view(np.uint16)[:, 0]
    return data


def _as_words(data: Tensor) -> NDArray[np.uint16]:
    return data.numpy().view(np.uint16)


def _inflate_bytes(raw: memoryview, size: int) -> NDArray[np.uint8]:
    """Return the `size` bytes that `raw` holds. No more are made, whatever `raw` holds."""
    # For zlib a limit of 0 is no limit.
    found = zlib.decompressobj().decompress(raw, max(1, size))
    if len(found) != size:
        raise ValueError(f"{len(found)} bytes where {size} were announced")
    return np.frombuffer(found, dtype=np.uint8)
