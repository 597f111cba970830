"""A slow line on this machine: a proxy that lets so many bytes a second through."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

HOST = "127.0.0.1"


class Throttle:
    """Forwards every connection to `host`:`port`, in each direction at most `bytes_s` a second.

    Its buffers are small, so that a sender sees the line's speed and not theirs.
    """

    def __init__(self, host: str, port: int, bytes_s: float) -> None:
        self._there, self._bytes_s = (host, port), bytes_s
        self._piece = int(min(1 << 20, max(4096, bytes_s / 200)))
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, max(1 << 16, self._piece))
        self._listener.bind((HOST, 0))
        self._listener.listen()
        self.port = self._listener.getsockname()[1]
        self._carried: list[list[int]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def carried(self) -> int:
        """Bytes so far, of both directions; what a receiver has is counted."""
        return sum(count for (count,) in self._carried)

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(self._there)
                for pair in ((here, there), (there, here)):
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        free, count = time.monotonic(), [0]
        self._carried.append(count)  # one for each thread: `+=` of two threads loses some
        with suppress(OSError):
            while piece := source.recv(self._piece):
                free = max(free, time.monotonic()) + len(piece) / self._bytes_s
                time.sleep(max(0.0, free - time.monotonic()))
                count[0] += len(piece)
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)
