"""Options of the run's sockets: a peer whose machine or cable is gone ends a connection in seconds.

A machine that loses its power says nothing. Without these options, a read waits for ever and a
write waits for about 15 minutes (tcp_retries2 of Linux).
"""

from __future__ import annotations

import socket

UNREACHABLE_S = 30.0
"""Seconds without any answer from the peer's kernel, after which a connection ends. A suspended or
busy peer does not count, because its kernel answers."""
UNREAD_S = 300.0
"""The same, for the end of a link that sends. There, Linux also counts the time in which the peer's
process reads nothing, so that a slow peer needs the longer limit."""
_IDLE_S, _PROBE_EVERY_S = 10, 5


def end_when_unreachable(sock: socket.socket, seconds: float = UNREACHABLE_S) -> None:
    """Let the kernel end this connection after `seconds` in which the peer cannot be reached."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": _IDLE_S,
        "TCP_KEEPINTVL": _PROBE_EVERY_S,
        # idle + interval x count = seconds
        "TCP_KEEPCNT": max(1, round((seconds - _IDLE_S) / _PROBE_EVERY_S)),
        "TCP_USER_TIMEOUT": round(1e3 * seconds),  # milliseconds
    }
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:  # Linux has them all
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
