"""The control store of a run: keys and values that only processes with the run's token can read and
write.

`torch.distributed`'s own TCPStore answers everybody who reaches its port. This one serves a
dictionary over connections that begin with a handshake (`digenrl.cluster.handshake`), one thread
each. Every call waits for its answer, so what one rank has set is visible to all others. Process
groups of torch use a `StoreClient` for their rendezvous. They do not keep the client alive.

A frame on the wire is its length (u32), then fields, each with its length (u32). The first field of
a request is its name.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from digenrl.cluster.handshake import AuthenticatedListener, Handshake, NotOfThisRun

_PURPOSE = "store"
_SIZE_BYTES = 4
_ABSENT, _PRESENT = b"", b"+"
_LOOK_S = 1
"""Seconds of one wait for an answer. A process that was suspended counts that time as one look. So
it does not report a store as lost that was suspended together with it."""


class StoreLost(RuntimeError):
    """The store no longer answers, because the process that hosts it is gone."""


class StoreServer:
    """Serves a store on `listener`, and closes it at the end. Earlier connections wait in the
    listener's backlog."""

    def __init__(self, listener: socket.socket, handshake: Handshake) -> None:
        self.host, self.port = listener.getsockname()[:2]
        self._values: dict[bytes, bytes] = {}
        # Held for the whole of one request, which makes every request atomic.
        self._lock = threading.Lock()
        self._open: defaultdict[int, list[socket.socket]] = defaultdict(list)
        """rank -> its connections. Connections without a rank are not kept."""
        self._out: set[int] = set()
        self._acceptor = AuthenticatedListener(
            listener, handshake, _PURPOSE, self._serve_connection
        )

    def close(self) -> None:
        """Accept no further connection. Idempotent."""
        self._acceptor.close()

    def connected_ranks(self) -> set[int]:
        """Return the ranks that named themselves and have an open connection."""
        with self._lock:
            return {rank for rank, sockets in self._open.items() if sockets}

    def exclude_rank(self, rank: int) -> None:
        """Answer no request of `rank` from now on, and close its connections."""
        with self._lock:
            self._out.add(rank)
            for sock in self._open[rank]:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _serve_connection(self, sock: socket.socket, rank: int) -> None:
        frames = _Frames(sock)
        with self._lock:
            if rank >= 0:
                self._open[rank].append(sock)
        try:
            while True:
                request = frames.receive_frame()
                with self._lock:
                    # Under the same lock as `exclude_rank`: no request takes effect after that call
                    # has returned.
                    if rank in self._out:
                        return
                    answer = self._answer_request(*request)
                # Outside of the lock, so that a slow peer does not hold up the others.
                frames.send_frame(*answer)
        except (OSError, EOFError):  # the rank has ended
            return
        finally:
            with self._lock:
                if rank >= 0:
                    self._open[rank].remove(sock)

    def _answer_request(self, name: bytes, *fields: bytes) -> Sequence[bytes]:
        values = self._values
        match name, *fields:
            case b"get", *keys:
                return [_PRESENT + values[key] if key in values else _ABSENT for key in keys]
            case b"set", key, value:
                values[key] = value
                return ()
            case b"add", key, amount:
                values[key] = b"%d" % (int(values.get(key, b"0")) + int(amount))
                return (values[key],)
            case b"swap", key, expected, desired:
                if values.get(key, b"") != expected:
                    return (_ABSENT,)
                values[key] = desired
                return (_PRESENT,)
            case b"delete", key:
                return (_ABSENT if values.pop(key, None) is None else _PRESENT,)
        raise ValueError(f"a store takes no request {name!r} of {len(fields)} fields.")


class StoreClient(dist.Store):
    """A connection to the store, shared by the threads of a process in turn.

    Raises:
        NotOfThisRun: another program listens there.
        StoreLost: nobody listens there. Every later call raises it when the store is gone.
    """

    def __init__(self, host: str, port: int, handshake: Handshake) -> None:
        super().__init__()
        try:
            self._socket = handshake.connect(host, port, _PURPOSE)
        except NotOfThisRun:
            raise
        except OSError as error:
            raise StoreLost(f"no store answers at {host}:{port}: {error}") from error
        self._frames = _Frames(self._socket, looks=max(1, round(handshake.answer_s / _LOOK_S)))
        self._lock = threading.Lock()

    def read_values(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of `keys`, None for each key that nobody has set."""
        found = self._send_request(b"get", *(key.encode() for key in keys))
        return [value[len(_PRESENT) :] if value else None for value in found]

    def compare_and_swap(self, key: str, expected: str, desired: str) -> bool:
        """Set `key` to `desired` if it holds `expected` ("" = nobody has set it): atomic."""
        return (
            self._send_request(b"swap", key.encode(), expected.encode(), desired.encode())[0]
            == _PRESENT
        )

    # ---- what process groups use

    def set(self, key: str, value: str | bytes) -> None:
        self._send_request(
            b"set", key.encode(), value.encode() if isinstance(value, str) else value
        )

    def add(self, key: str, value: int) -> int:
        return int(self._send_request(b"add", key.encode(), b"%d" % value)[0])

    def delete_key(self, key: str) -> bool:
        return self._send_request(b"delete", key.encode())[0] == _PRESENT

    def check(self, keys: list[str]) -> bool:
        return None not in self.read_values(keys)

    def get(self, key: str) -> bytes:
        self.wait([key])
        (value,) = self.read_values([key])
        return value or b""

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]
        pause = 0.001
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"nobody set {', '.join(keys)} in time.")
            time.sleep(pause)
            pause = min(0.05, 2 * pause)

    def clone(self) -> dist.Store:
        """Return this client, which threads may share."""
        return self

    def _send_request(self, *request: bytes) -> list[bytes]:
        with self._lock:
            try:
                self._frames.send_frame(*request)
                return self._frames.receive_frame()
            except (OSError, EOFError) as error:
                self._socket.close()  # an answer that comes too late would be the next call's
                raise StoreLost(f"the store does not answer any more: {error}") from error
            except BaseException:  # an answer that nobody has read would be the next call's
                self._socket.close()
                raise


class _Frames:
    """Frames on one connection.

    Args:
        looks: how many times `_LOOK_S` the next bytes may take; None = any time.
    """

    def __init__(self, sock: socket.socket, looks: int | None = None) -> None:
        self._sock, self._looks, self._rest = sock, looks, b""
        if looks is not None:
            # The kernel's timer. The socket stays blocking, and recv raises BlockingIOError on
            # expiry.
            limit = struct.pack("ll", _LOOK_S, 0)  # struct timeval
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def send_frame(self, *fields: bytes) -> None:
        body = b"".join(len(field).to_bytes(_SIZE_BYTES) + field for field in fields)
        self._sock.sendall(len(body).to_bytes(_SIZE_BYTES) + body)

    def receive_frame(self) -> list[bytes]:
        """Return the fields of the next frame.

        Raises:
            EOFError: the peer has closed the connection.
            TimeoutError: the peer is silent for longer than it may be.
        """
        body = self._take_bytes(int.from_bytes(self._take_bytes(_SIZE_BYTES)))
        fields, start = [], 0
        while start < len(body):
            size = int.from_bytes(body[start : start + _SIZE_BYTES])
            start += _SIZE_BYTES + size
            fields.append(body[start - size : start])
        return fields

    def _take_bytes(self, size: int) -> bytes:
        while len(self._rest) < size:
            piece = self._receive_some()
            if not piece:
                raise EOFError("the connection was closed")
            self._rest += piece
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken

    def _receive_some(self) -> bytes:
        silent = 0
        while True:
            try:
                # One call usually brings a whole frame; what lies beyond is kept for the next one.
                return self._sock.recv(1 << 16)
            except BlockingIOError:  # SO_RCVTIMEO has passed
                silent += 1
                if silent == self._looks:
                    raise TimeoutError(f"no answer within {silent * _LOOK_S} s") from None
