"""Mutual authentication: both ends of a connection prove that they hold the run's token, and
neither sends it.

    connecting end                                             listening end
    magic | rank | nonce                                 ->
                                                         <-    nonce | HMAC(token, "l", all of both nonces, purpose)
    HMAC(token, "c", the same)                           ->
                                                         <-    welcome

The listening end proves itself first, so a stranger who listens at an address learns nothing from a
rank that connects. The nonces are new each time, so a recorded handshake cannot be replayed. The
letters "l" and "c" keep a proof from being reflected to its sender. The purpose (the store, the
data link of rank 3) keeps a proof from being used at another listener. The proofs are HMAC-SHA256,
compared in constant time. The data that follows is neither encrypted nor signed: an attacker who
can change packets between the machines is not kept out (SECURITY.md).
"""  # noqa: E501

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

from digenrl.cluster.sockets import end_when_unreachable

_HELLO = struct.Struct("!4si32s")  # magic, rank, nonce
_MAGIC = b"DGR1"
_NONCE_BYTES = _PROOF_BYTES = 32
_WELCOME = b"+"


class NotOfThisRun(ConnectionError):
    """The process that listens at an address does not hold the run's token."""


@dataclass(frozen=True)
class Handshake:
    """The run's token, and the limits for connections that have not proved that they hold it."""

    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    seconds: float = 10.0
    """Seconds after which a connection without a proof is closed."""
    waiting: int = 64
    """Most connections without a proof that a listener keeps open. One more closes the oldest."""
    connect_s: float = 60.0
    """Longest wait of a connecting end, in seconds. The launcher accepts nobody before it has
    forked every rank."""
    answer_s: float = 60.0
    """Longest wait for the store's answer to one request, in seconds."""
    rank: int = -1
    """Rank as which this process connects to the store; -1 = none. A rank that joined names itself,
    so that the store can shut it out."""

    def connect(self, host: str, port: int, purpose: str, rank: int | None = None) -> socket.socket:
        """Connect to the listener for `purpose` at `host`:`port`, as `rank` (None: as `self.rank`),
        and return the socket.

        Raises:
            NotOfThisRun: the listener could not prove that it holds the token.
            OSError: nobody listens, or no answer came in time.
        """
        deadline = time.monotonic() + self.connect_s
        while True:
            sock = socket.create_connection((host, port), timeout=self.connect_s)
            try:
                self._exchange_proofs(sock, purpose, self.rank if rank is None else rank, deadline)
            except (EOFError, ConnectionResetError) as error:  # strangers pushed it out: once more
                sock.close()
                if time.monotonic() > deadline:
                    raise ConnectionError(
                        f"{host}:{port} closes every connection before it answers."
                    ) from error
                time.sleep(0.05)
            except BaseException:
                sock.close()
                raise
            else:
                # From here on silence is no error. Keepalive finds a peer whose machine is gone.
                sock.settimeout(None)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                end_when_unreachable(sock)
                return sock

    def _exchange_proofs(
        self, sock: socket.socket, purpose: str, rank: int, deadline: float
    ) -> None:
        hello = _HELLO.pack(_MAGIC, rank, secrets.token_bytes(_NONCE_BYTES))
        sock.sendall(hello)
        nonce, proof = (
            _read_exactly(sock, _NONCE_BYTES, deadline),
            _read_exactly(sock, _PROOF_BYTES, deadline),
        )
        if not hmac.compare_digest(proof, self._handshake_proof(b"l", hello, nonce, purpose)):
            host, port = sock.getpeername()[:2]
            raise NotOfThisRun(
                f"who listens at {host}:{port} does not hold this run's token: no rank of this run."
            )
        sock.sendall(self._handshake_proof(b"c", hello, nonce, purpose))
        _read_exactly(sock, len(_WELCOME), deadline)

    def authenticate_peer(self, sock: socket.socket, purpose: str) -> int | None:
        """Return the rank of the peer of an accepted connection once the peer has proved itself;
        None if it does not.

        The caller then sends the byte of welcome for which the peer waits.
        """
        deadline = time.monotonic() + self.seconds
        try:
            hello = _read_exactly(sock, _HELLO.size, deadline)
            magic, rank, _ = _HELLO.unpack(hello)
            if magic != _MAGIC:
                return None
            nonce = secrets.token_bytes(_NONCE_BYTES)
            sock.sendall(nonce + self._handshake_proof(b"l", hello, nonce, purpose))
            proof = _read_exactly(sock, _PROOF_BYTES, deadline)
        except (OSError, EOFError):
            return None
        return (
            int(rank)
            if hmac.compare_digest(proof, self._handshake_proof(b"c", hello, nonce, purpose))
            else None
        )

    def _handshake_proof(self, end: bytes, hello: bytes, nonce: bytes, purpose: str) -> bytes:
        return hmac.digest(self.token.encode(), end + hello + nonce + purpose.encode(), "sha256")


class AuthenticatedListener:
    """Accepts connections in a thread of its own, and runs `welcome(connection, rank)` in one
    thread per proved connection.

    A connection must prove itself for `purpose`. It is closed when `welcome` returns.
    """

    def __init__(
        self,
        listener: socket.socket,
        handshake: Handshake,
        purpose: str,
        welcome: Callable[[socket.socket, int], None],
    ) -> None:
        self._listener, self._handshake, self._purpose, self._welcome = (
            listener,
            handshake,
            purpose,
            welcome,
        )
        # In order of arrival, so that the first one is the oldest.
        self._waiting: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(
            target=self._accept_connections, name=f"accept {purpose}", daemon=True
        ).start()

    def close(self) -> None:
        """Accept no further connection; established ones stay open. Idempotent."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self._listener.close()

    def _accept_connections(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except (
                OSError
            ):  # closed; else no file handle is free, and some rank's end may give one back
                time.sleep(0.05)
                continue
            with self._lock:
                if len(self._waiting) >= self._handshake.waiting:
                    oldest = next(iter(self._waiting))
                    del self._waiting[oldest]
                    # Only shut down here: the thread that reads from this socket wakes up and
                    # closes it.
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)
                self._waiting[sock] = None
            # One thread for each, because a stranger may keep it waiting until the deadline.
            threading.Thread(
                target=self._authenticate_connection, args=(sock,), name=self._purpose, daemon=True
            ).start()

    def _authenticate_connection(self, sock: socket.socket) -> None:
        with sock:
            rank = self._handshake.authenticate_peer(sock, self._purpose)
            with self._lock:
                # The connection may have been pushed out just as its proof arrived; it is already
                # shut down then.
                pushed_out = sock not in self._waiting
                self._waiting.pop(sock, None)
            if rank is None or pushed_out:
                return
            sock.settimeout(None)
            with suppress(OSError):  # its next call says so
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                end_when_unreachable(sock)
                sock.sendall(_WELCOME)
            self._welcome(sock, rank)


def _read_exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    """Return exactly `size` bytes, all received before `deadline`. A peer that sends single bytes
    gains no time.

    Raises:
        EOFError: the peer closed the connection.
        TimeoutError: the deadline has passed.
    """
    found = b""
    while len(found) < size:
        # A timeout of 0 would make the socket non-blocking.
        sock.settimeout(max(1e-3, deadline - time.monotonic()))
        piece = sock.recv(size - len(found))
        if not piece:
            raise EOFError("the peer closed the connection during the handshake")
        found += piece
        if time.monotonic() > deadline:
            raise TimeoutError("the handshake took too long")
    return found
