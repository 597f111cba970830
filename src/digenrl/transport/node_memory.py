"""One copy of a version for all ranks of a machine.

    sender, thread of a peer                                peer, reader thread
    puts the bucket into memory of its own (memfd),    -->  maps it, and answers with a byte;
    once for all peers; sends where the bucket is      <--  or answers that it cannot
    then sends the bytes as to any other machine       -->

A version that arrives was once copied for every rank: 8 rollouts of a machine kept 8 copies of all
weights. A mapping is private: what a rank writes to its weights it does not write into another's.
The memory belongs to no file. The kernel frees the memory with the last process that maps it.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from digenrl.transport.link import PeerLine, write_message
from digenrl.transport.weights import is_bucket
from digenrl.transport.wire import Message, tensor_bytes

SHARED = "shared"
"""Key of a message's meta: [process, descriptor, bytes] of the memory that holds its data."""
_LEAST_BYTES = 1 << 20
_MAPPED, _UNSEEN = b"+", b"-"


def machine_identity() -> str:
    """Return a text that is equal on ranks that can map each other's memory: the machine's boot,
    the namespace of process numbers, and the user. "": the system has no shared memory of this
    kind."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        # Times False, the text is empty.
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}" * hasattr(
            os, "memfd_create"
        )
    except OSError:
        return ""


class SharedBuckets:
    """What one process shares: the buckets of its newest version."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._version = -1
        self._newest: dict[tuple[int, int], _SharedBucket] = {}
        self.receivers: set[SharedLine] = set()
        """Lines to ranks of this machine that have had weights from here."""

    def shared_bucket(self, message: Message) -> _SharedBucket:
        """Return the memory that holds a bucket's data; the first of all peers makes it.

        Raises:
            OSError: there is no memory of that kind.
        """
        data, version = message.tensors["data"], message.meta["version"]
        with self._lock:  # the peers' threads wait for the copy, and need no other
            if version != self._version:
                # Drops the version before. Peers that still map it keep its memory alive.
                self._version, self._newest = version, {}
            # The bucket holds `data`, so no other tensor can have its address.
            place = message.meta["bucket"], data.data_ptr()
            if place not in self._newest:
                self._newest[place] = _SharedBucket(data)
            return self._newest[place]


class _SharedBucket:
    """Memory of this process with the bytes of `data`, which others can map while this object
    lives."""

    def __init__(self, data: Tensor) -> None:
        self.data, size = data, len(data)
        descriptor = os.memfd_create("digenrl-weights", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        self.place, written = [os.getpid(), descriptor, size], 0
        # Twice as fast as a copy into mapped memory, whose pages are made one by one.
        while written < size:
            written += os.write(descriptor, tensor_bytes(data)[written:])


class SharedLine(PeerLine):
    """A connection between ranks of one machine: buckets of weights stay where they are."""

    def __init__(self, shared: SharedBuckets) -> None:
        self._shared, self._can = shared, True
        self._held: tuple[_SharedBucket, Message] | None = None
        """Bucket of the message that is being written, and the message with its bytes."""

    def prepare_outgoing(self, message: Message) -> Message:
        self._held = None
        if self._can and _is_large_bucket(message):
            self._shared.receivers.add(self)
            # For a single receiver, a copy into shared memory would save nothing.
            with suppress(OSError):
                if len(self._shared.receivers) > 1:
                    self._held = self._shared.shared_bucket(message), message
        if self._held is None:
            return message
        meta = {**message.meta, SHARED: self._held[0].place}
        return replace(message, meta=meta, tensors={})

    def note_written(self, message: Message, sock: socket.socket) -> None:
        """Wait until the peer has mapped the bucket: it must live until then."""
        held, self._held = self._held, None
        if held is None:
            return
        # The only byte that travels against the direction of a connection.
        answer = sock.recv(1)
        if not answer:
            raise ConnectionError("the peer closed the connection")
        if answer == _UNSEEN:
            # The peer cannot open this process's descriptors. It gets bytes from now on.
            self._can = False
            write_message(sock, held[1])

    def accept_incoming(self, message: Message, sock: socket.socket) -> Message | None:
        if SHARED not in message.meta:
            return message
        meta = {key: value for key, value in message.meta.items() if key != SHARED}
        try:
            data = _map_memory(*message.meta[SHARED])
        except OSError:
            sock.sendall(_UNSEEN)
            return None
        sock.sendall(_MAPPED)
        digest = xxhash.xxh3_64_hexdigest(tensor_bytes(data))
        return replace(message, meta=meta, tensors={"data": data}, digest=digest)


def _is_large_bucket(message: Message) -> bool:
    return is_bucket(message) and len(message.tensors["data"]) >= _LEAST_BYTES


def _map_memory(process: int, descriptor: int, size: int) -> Tensor:
    """Return the bytes of another process's memory, mapped: copied where somebody writes."""
    opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(opened, size, access=mmap.ACCESS_COPY)
    finally:
        os.close(opened)
    return torch.frombuffer(memory, dtype=torch.uint8)
