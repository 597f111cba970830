"""Fewer bytes on slow connections, exact to the bit: `network.compress=auto`.

    thread of the sender                                   reader thread of the receiver
    version 1: as it is; tells the connection's speed -->  kept
    version 2: its difference to version 1            -->  version 1 and the difference; digest of the whole
    trajectories: without what was sent before        -->  completed

Each connection decides for itself, before each version, by the measured speeds of the connection
and of the codec. On a fast one nothing is coded, and nothing kept after the first version. Both
ends see the same messages in the same order, so they hold the same earlier version.
"""  # noqa: E501

from __future__ import annotations

import fcntl
import math
import socket
import struct
import termios
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import xxhash
from torch import Tensor

from digenrl.transport.difference import apply_difference, encode_difference
from digenrl.transport.link import PeerLine
from digenrl.transport.repeated import Repeated
from digenrl.transport.weights import is_bucket
from digenrl.transport.wire import Message, MessageKind, WireError, tensor_bytes

_CODED = "coded"
"""Key of a message's meta: how the receiver completes the message, and whether it keeps it."""
_LEAST_S, _LEAST_BYTES = 0.05, 1 << 20
"""What took fewer seconds and bytes says nothing about a connection's speed."""
_DRAINED_S = 10.0
"""Longest wait until the peer's kernel has what was written."""


class CodedLine(PeerLine):
    """One direction of a connection that sends differences while that is faster."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[int, Tensor]] = {}
        """Bucket -> version and bytes that both ends hold."""
        self._repeated = Repeated()
        self.speed = 0.0
        """Bytes a second of the connection; 0: not measured yet."""
        self.codec_speed, self.left = 200e6, 0.3
        """Bytes a second of the codec, and the share of the bytes that it leaves: guesses, until a
        version was coded."""
        self._began, self._busy_s, self._sent = 0.0, 0.0, 0
        """Second at which the present write began; seconds and bytes of the writes since the last
        measurement. Waits for the next message are left out."""
        self._raw, self._coding_s = 0, 0.0
        """Bytes that were coded since then, and the seconds that took."""

    @property
    def coding(self) -> bool:
        """Whether the next version and trajectories are coded: whether 1/codec + left/speed is less
        than 1/speed."""
        return 0.0 < self.speed < self.codec_speed * (1.0 - self.left)

    def prepare_outgoing(self, message: Message) -> Message:
        if message.kind is MessageKind.CELLS and self.coding:
            tensors, facts = self._repeated.drop_repeated(message.tensors)
            message = _mark_coded(message, facts, tensors)
        elif _is_numbered_bucket(message):
            message = self._outgoing_bucket(message)
        self._began = time.monotonic()
        return message

    def _outgoing_bucket(self, message: Message) -> Message:
        number, index = message.meta["version"], message.meta["bucket"]
        data, base = message.tensors["data"], self._kept.pop(index, None)
        # Measured, and fast enough as it is: keep nothing.
        if self.speed and not self.coding:
            return message
        self._kept[index] = number, data
        if not self.coding or base is None or len(base[1]) != len(data):
            # Marked, so that the receiver too keeps it as the base of the next version.
            return _mark_coded(message, {}, message.tensors)
        began = time.monotonic()
        payload, facts = encode_difference(data, base[1])
        self._coding_s += time.monotonic() - began
        self._raw += len(data)
        return _mark_coded(message, facts | {"base": base[0]}, {"data": payload})

    def note_written(self, message: Message, sock: socket.socket) -> None:
        """Measure the connection after a version, or after a trajectory."""
        self._sent += sum(tensor.nbytes for tensor in message.tensors.values())
        self._busy_s += time.monotonic() - self._began
        # More of this version follows. Measure after its last message.
        if "bucket" in message.meta:
            return
        began = time.monotonic()
        # A write ends in the kernel of this machine. Wait until the peer's kernel has the bytes.
        while (waiting := _unconfirmed_bytes(sock)) and time.monotonic() < began + _DRAINED_S:
            time.sleep(0.001)
        seconds = self._busy_s + time.monotonic() - began
        # The system does not tell, so count the connection as fast.
        if waiting is None:
            self.speed = math.inf
        elif seconds > _LEAST_S or self._sent > _LEAST_BYTES:
            speed = (self._sent - waiting) / max(seconds, 1e-6)
            # Mean with the last estimate, so that one stall does not decide alone.
            self.speed = 0.5 * (speed + (self.speed or speed))
        if self._raw:
            self.codec_speed, self.left = self._raw / self._coding_s, self._sent / self._raw
        self._busy_s, self._sent, self._raw, self._coding_s = 0.0, 0, 0, 0.0

    def accept_incoming(self, message: Message, sock: socket.socket) -> Message:
        coded = message.meta.get(_CODED)
        if coded is None:
            # It came as it is, and then neither end keeps a base.
            if _is_numbered_bucket(message):
                self._kept.pop(message.meta["bucket"], None)
            return message
        meta = {key: value for key, value in message.meta.items() if key != _CODED}
        try:
            if message.kind is MessageKind.CELLS:
                tensors = self._repeated.restore_repeated(message.tensors, coded)
                return replace(message, meta=meta, tensors=tensors)
            index, data, digest = int(meta["bucket"]), message.tensors["data"], message.digest
            if "base" in coded:
                number, base = self._kept[index]
                if number != coded["base"]:
                    raise KeyError(f"version {coded['base']}")
                data = apply_difference(data, coded, base)
                digest = xxhash.xxh3_64_hexdigest(tensor_bytes(data))
            self._kept[index] = int(meta["version"]), data
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise WireError(f"a compressed message cannot be completed: {error!r}.") from error
        return replace(message, meta=meta, tensors={"data": data}, digest=digest)


def _is_numbered_bucket(message: Message) -> bool:
    """Return whether a message is part of a version. Weights of an evaluation have no number, and
    are near no version."""
    return is_bucket(message) and message.meta.get("version", -1) >= 0


def _mark_coded(
    message: Message, facts: Mapping[str, object], tensors: Mapping[str, Tensor]
) -> Message:
    return replace(message, meta={**message.meta, _CODED: dict(facts)}, tensors=tensors)


def _unconfirmed_bytes(sock: socket.socket) -> int | None:
    """Return how many written bytes the peer's kernel has not confirmed; None where the system does
    not tell."""
    with suppress(OSError):
        return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0])
    return None
