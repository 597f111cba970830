"""Who may speak: both ends of a connection prove that they hold the run's token, and neither shows it.

    connecting end                                             listening end
    magic | rank | nonce                                 ->
                                                         <-    nonce | HMAC(token, "l", all of both nonces, purpose)
    HMAC(token, "c", the same)                           ->
                                                         <-    welcome

The listening end proves itself first, so nobody who waits at an address learns anything by waiting there. The nonces
are new each time, so a recorded handshake is worth nothing; nor is a reflected one, because of the letters, nor one
that is carried to another door, because of the purpose (the store, the data link of rank 3). HMAC-SHA256, compared in
constant time. What follows on the connection is neither encrypted nor signed: whoever can change packets between the
machines is not kept out (SECURITY.md).
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

_HELLO = struct.Struct("!4si32s")
_MAGIC = b"DGR1"
_NONCE_BYTES = _PROOF_BYTES = 32
_WELCOME = b"+"


class NotOfThisRun(ConnectionError):
    """Who listens at an address does not hold the run's token."""


@dataclass(frozen=True)
class Handshake:
    """The run's token, and how long and how many strangers may stand at a door of the run."""

    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    seconds: float = 10.0
    """A connection that has not proved itself by then is closed."""
    waiting: int = 64
    """Connections of a listener that have not proved themselves yet; one more ends the oldest."""
    connect_s: float = 60.0
    """Longest wait of a connecting end: the launcher accepts nobody before it has forked every rank."""
    rank: int = -1
    """As whom this process connects to the store: a rank that joined says so, and can then be shut out; -1: nobody."""

    def connect(self, host: str, port: int, purpose: str, rank: int | None = None) -> socket.socket:
        """A connection to who listens there for `purpose`, as `rank` (None: as `self.rank`).

        Raises:
            NotOfThisRun: whoever listens there could not prove itself.
            OSError: nobody does, or no answer came in time.
        """
        deadline = time.monotonic() + self.connect_s
        while True:
            sock = socket.create_connection((host, port), timeout=self.connect_s)
            try:
                self._ask(sock, purpose, self.rank if rank is None else rank, deadline)
            except (EOFError, ConnectionResetError) as error:  # strangers pushed it out: once more
                sock.close()
                if time.monotonic() > deadline:
                    raise ConnectionError(f"{host}:{port} closes every connection before it answers.") from error
                time.sleep(0.05)
            except BaseException:
                sock.close()
                raise
            else:
                sock.settimeout(None)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return sock

    def _ask(self, sock: socket.socket, purpose: str, rank: int, deadline: float) -> None:
        hello = _HELLO.pack(_MAGIC, rank, secrets.token_bytes(_NONCE_BYTES))
        sock.sendall(hello)
        nonce, proof = _read(sock, _NONCE_BYTES, deadline), _read(sock, _PROOF_BYTES, deadline)
        if not hmac.compare_digest(proof, self._proof(b"l", hello, nonce, purpose)):
            host, port = sock.getpeername()[:2]
            raise NotOfThisRun(f"who listens at {host}:{port} does not hold this run's token: no rank of this run.")
        sock.sendall(self._proof(b"c", hello, nonce, purpose))
        _read(sock, len(_WELCOME), deadline)

    def admit(self, sock: socket.socket, purpose: str) -> int | None:
        """The rank of a peer that proves itself on an accepted connection; None for anybody else. It waits for a byte
        of welcome."""
        deadline = time.monotonic() + self.seconds
        try:
            hello = _read(sock, _HELLO.size, deadline)
            magic, rank, _ = _HELLO.unpack(hello)
            if magic != _MAGIC:
                return None
            nonce = secrets.token_bytes(_NONCE_BYTES)
            sock.sendall(nonce + self._proof(b"l", hello, nonce, purpose))
            proof = _read(sock, _PROOF_BYTES, deadline)
        except (OSError, EOFError):
            return None
        return int(rank) if hmac.compare_digest(proof, self._proof(b"c", hello, nonce, purpose)) else None

    def _proof(self, end: bytes, hello: bytes, nonce: bytes, purpose: str) -> bytes:
        return hmac.digest(self.token.encode(), end + hello + nonce + purpose.encode(), "sha256")


class Gate:
    """Accepts connections in a thread of its own, and calls `welcome(connection, rank)` in one thread for each that
    proves itself for `purpose`; the connection is closed when that returns."""

    def __init__(
        self,
        listener: socket.socket,
        handshake: Handshake,
        purpose: str,
        welcome: Callable[[socket.socket, int], None],
    ) -> None:
        self._listener, self._handshake, self._purpose, self._welcome = listener, handshake, purpose, welcome
        self._waiting: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, name=f"accept {purpose}", daemon=True).start()

    def close(self) -> None:
        """Accept nobody any more; who is inside stays. Idempotent."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed; else no file handle is free, and some rank's end may give one back
                time.sleep(0.05)
                continue
            with self._lock:
                if len(self._waiting) >= self._handshake.waiting:
                    oldest = next(iter(self._waiting))
                    del self._waiting[oldest]
                    _end(oldest)
                self._waiting[sock] = None
            threading.Thread(target=self._meet, args=(sock,), name=self._purpose, daemon=True).start()

    def _meet(self, sock: socket.socket) -> None:
        with sock:
            rank = self._handshake.admit(sock, self._purpose)
            with self._lock:
                pushed_out = sock not in self._waiting
                self._waiting.pop(sock, None)
            if rank is None or pushed_out:
                return
            sock.settimeout(None)
            with suppress(OSError):  # its next call says so
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.sendall(_WELCOME)
            self._welcome(sock, rank)


def _end(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _read(sock: socket.socket, size: int, deadline: float) -> bytes:
    """Exactly `size` bytes, all of them before `deadline`: a peer that sends a byte now and then gains nothing.

    Raises:
        EOFError: the peer closed the connection.
        TimeoutError: the time is over.
    """
    found = b""
    while len(found) < size:
        sock.settimeout(max(1e-3, deadline - time.monotonic()))
        piece = sock.recv(size - len(found))
        if not piece:
            raise EOFError("the peer closed the connection during the handshake")
        found += piece
        if time.monotonic() > deadline:
            raise TimeoutError("the handshake took too long")
    return found
