"""Thin lines: send fewer bytes between two ranks with a slow connection, without changing a bit of
the result.

    outgoing   bucket of version v -> XOR with the same bucket of the version sent before -> packed
    incoming   unpacked -> XOR with the bucket that arrived before -> bucket of version v

Both ends of a connection see the same messages in the same order, so they keep the same buckets and
need no agreement. Trajectories and suspended tasks are packed only. The digest of a version is
always that of the whole version.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from digenrl.extensions.links.packing import packed, unpacked
from digenrl.hardware import assign, parse_hardware
from digenrl.transport.link import PeerLine
from digenrl.transport.wire import Message, MessageKind, WireError

BASE = "base"
"""Key of a message's meta: version with which the bucket is combined."""
KEEP = "keep"
"""Key of a message's meta: tells the receiver to keep the bucket, because the next version may come
as a delta."""
_BURSTS, _FULL = 4, 2
"""Number of bursts (messages without a pause) from which a line's speed is estimated. A burst
counts if it exceeds the kernel's buffer by the factor `_FULL`."""


@dataclass(frozen=True)
class ThinSettings:
    """Keys of the `network` group for thin lines."""

    delta: bool | str = "auto"
    compress: bool | str = "auto"
    whole_every: int = 50
    thin_mb_s: float = 50.0

    def packs(self, thin: bool) -> bool:
        """Return whether a line, thin or not, packs its messages."""
        return thin if self.compress == "auto" else bool(self.compress)

    def sends_deltas(self, thin: bool) -> bool:
        """Return whether a line, thin or not, sends deltas of versions."""
        return thin if self.delta == "auto" else bool(self.delta)


class ThinLine(PeerLine):
    """`Line` that packs its messages and sends deltas while it is slow ("thin").

    Args:
        said_mb_s: MB/s of the line in the hardware profile; inf where the profile does not say.
    """

    def __init__(self, settings: ThinSettings, said_mb_s: float = math.inf) -> None:
        self._settings, self._said = settings, said_mb_s
        self._seen: deque[float] = deque(maxlen=_BURSTS)
        self._burst, self._began = 0, 0.0
        self._buckets = _Buckets()

    @property
    def thin(self) -> bool:
        """Whether the line is slower than `thin_mb_s`, by the profile or by the fastest of its last
        bursts."""
        return min(self._said, max(self._seen, default=math.inf)) < self._settings.thin_mb_s

    def outgoing(self, message: Message) -> Message:
        self._began = self._began if self._burst else time.monotonic()
        thin = self.thin
        if _is_end(message):
            self._buckets.end(message.meta["version"])
        elif _is_bucket(message) and self._settings.sends_deltas(thin):
            message = self._delta(message)
        return packed(message) if BASE in message.meta or self._settings.packs(thin) else message

    def written(self, size: int, room: int, more: bool) -> None:
        self._burst += size
        if not more:
            if self._burst > _FULL * room:  # bytes in the buffer have not crossed the line yet
                self._seen.append((self._burst - room) / (time.monotonic() - self._began) / 1e6)
            self._burst = 0

    def incoming(self, message: Message) -> Message:
        message = unpacked(message)
        if _is_end(message):
            self._buckets.end(message.meta["version"])
        return self._whole(message) if _is_bucket(message) else message

    def _delta(self, message: Message) -> Message:
        """Return the message with a delta in place of its bucket, if the peer holds the version
        before."""
        number, index, data = (
            message.meta["version"],
            message.meta["bucket"],
            message.tensors["data"],
        )
        if number < 0:  # no delta is made against weights of an evaluation
            return message
        held, meta = self._buckets.take(index), {**message.meta, KEEP: True}
        if number % self._settings.whole_every and held is not None and len(held) == len(data):
            message = replace(message, tensors={"data": data ^ held})
            meta[BASE] = self._buckets.number
        self._buckets.keep(number, index, data)
        return replace(message, meta=meta)

    def _whole(self, message: Message) -> Message:
        """Return the message with its whole bucket, as it was before the peer's `_delta`."""
        number, index, data = (
            message.meta["version"],
            message.meta["bucket"],
            message.tensors["data"],
        )
        meta = {key: value for key, value in message.meta.items() if key not in (BASE, KEEP)}
        if (base := message.meta.get(BASE)) is not None:
            held = self._buckets.take(index)
            if held is None or self._buckets.number != base or len(held) != len(data):
                raise WireError(
                    f"version {number} came as a delta of version {base}, which this rank does not "
                    "hold."
                )
            message = replace(message, tensors={"data": data.bitwise_xor_(held)}, digest=None)
        if KEEP in message.meta:
            self._buckets.keep(number, index, data)
        return replace(message, meta=meta)


def _is_bucket(message: Message) -> bool:
    """Return whether the message brings a part of a version."""
    return (
        message.kind is MessageKind.WEIGHTS
        and "data" in message.tensors
        and "bucket" in message.meta
    )


def _is_end(message: Message) -> bool:
    """Return whether the message is the last one of a version."""
    return message.kind is MessageKind.WEIGHTS and "digest" in message.meta


class _Buckets:
    """Buckets of the newest version that went over a connection in one direction. A bucket is
    dropped when its successor comes, so that both ends hold little more than one version."""

    def __init__(self) -> None:
        self.number: int | None = None
        """Number of the complete version; None before the first."""
        self._held: dict[int, Tensor] = {}
        self._coming: tuple[int | None, dict[int, Tensor]] = (None, {})
        """Number of the version in progress, and its buckets so far."""

    def take(self, index: int) -> Tensor | None:
        """Return bucket `index` of the complete version, and drop it."""
        return self._held.pop(index, None)

    def keep(self, number: int, index: int, data: Tensor) -> None:
        """Keep a bucket of version `number`, which is in progress."""
        if self._coming[0] != number:
            self._coming = number, {}
        self._coming[1][index] = data

    def end(self, number: int) -> None:
        """Make version `number` the complete one; an evaluation's version (< 0) changes nothing."""
        if number >= 0:
            self.number, self._held = number, self._coming[1] if self._coming[0] == number else {}
            self._coming = None, {}


def said_mb_s(
    node: Mapping[str, Any], trainers: int, rollouts: int, rank: int
) -> tuple[float, ...]:
    """Return the MB/s between `rank` and each rank by the `hardware` node; inf where the node does
    not say.

    A rank that joined later counts as being in the place of the last rollout.
    """
    if not node.get("links"):
        return ()
    hardware = parse_hardware(node)
    pools = [pool for pool, _ in assign(hardware, trainers, rollouts)]
    own = pools[min(rank, len(pools) - 1)]
    lines = [hardware.line(own, pool) for pool in pools]
    return tuple(math.inf if line is None else line.gb_s * 1e3 for line in lines)
