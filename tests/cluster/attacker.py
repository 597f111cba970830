"""Another program on the machine of a run, without its token: `python attacker.py LAUNCHER_PID`.

It knows the code, the ports and the names of all keys. It repeats its tries until its standard
input ends, and then prints {"rounds": tries made, "ports": ports attacked, "taken": what it got
that it should not have}.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import sys
import threading
from contextlib import suppress
from datetime import timedelta

import psutil
import torch.distributed as dist

HELLO = struct.pack("!4si32s", b"DGR1", 0, os.urandom(32))
GIVEN_TO_ANYBODY = 64
"""The listening end's nonce and proof."""


def frame(*fields: bytes) -> bytes:
    """A request to the store."""
    body = b"".join(len(field).to_bytes(4) + field for field in fields)
    return len(body).to_bytes(4) + body


MESSAGE = struct.pack("!4sHIH", b"DGRL", 1, 12, 0) + b'{"names":[]}'


class Attacker:
    """An attacker's tries on one port of a run, each named. `taken` collects answers that should
    not have come."""

    def __init__(self, trap: int) -> None:
        self.taken: list[str] = []
        self.rounds = 0
        address = f"127.0.0.1:{trap}".encode()
        self._requests = {
            "read the cause": frame(b"get", b"abort", b"address/0", b"work/1"),
            "abort the run": frame(b"set", b"abort", b"somebody else says so"),
            "stop the run": frame(b"set", b"stop", b"1"),
            "end the run": frame(b"set", b"done", b"1"),
            "lose a rank": frame(b"set", b"lost", b"1 2"),
            "claim a task": frame(b"add", b"claim/v0", b"5")
            + frame(b"swap", b"owner/v0/0", b"", b"2:0:0:0:0:0"),
            "take an address": frame(b"set", b"address/0", address)
            + frame(b"set", b"address/1", address),
            "set back the version": frame(b"delete", b"version"),
            "send a message": MESSAGE,
            "send an endless message": struct.pack("!4sHIH", b"DGRL", 1, 0xFFFFFFFF, 0xFFFF)
            + bytes(1 << 16),
        }

    def attack(self, port: int) -> None:
        """Every try once."""
        for name, request in self._requests.items():
            self._speak(name + " without a handshake", port, request, 0)
            self._speak(
                name + " with a guessed proof",
                port,
                HELLO + os.urandom(32) + request,
                GIVEN_TO_ANYBODY,
            )
        self._speak("http", port, b"GET / HTTP/1.1\r\n\r\n" + bytes(64), 0)
        self._reflect(port)
        self._flood(port)
        self.rounds += 1

    def as_torch(self, port: int) -> None:
        """What torch's own store client may do."""
        with suppress(RuntimeError):
            store = dist.TCPStore(
                "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(0, 1)
            )
            store.set("abort", "torch says so")
            self.taken.append(f"torch's client listed {store.num_keys()} keys")

    def _speak(self, name: str, port: int, said: bytes, most: int) -> None:
        """Say something; more than `most` bytes of answer are a success."""
        answer = b""
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.5) as sock:
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
            while piece := sock.recv(1 << 16):
                answer += piece
        if len(answer) > most:
            self.taken.append(f"{name}: {answer!r}")

    def _reflect(self, port: int) -> None:
        """The listening end's own proof sent back to it."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.5) as sock:
            sock.sendall(HELLO)
            answer = sock.recv(GIVEN_TO_ANYBODY, socket.MSG_WAITALL)
            sock.sendall(answer[32:] + frame(b"set", b"abort", b"reflected"))
            if more := sock.recv(1 << 10):
                self.taken.append(f"reflected proof: {more!r}")

    def _flood(self, port: int) -> None:
        with suppress(OSError):
            sockets = [
                socket.create_connection(("127.0.0.1", port), timeout=0.5) for _ in range(100)
            ]
            for sock in sockets:
                sock.sendall(HELLO[:-1])
            for sock in sockets:
                sock.close()


def listening(pid: int) -> set[int]:
    """Ports on which a process and its children listen."""
    found: set[int] = set()
    with suppress(psutil.Error):
        launcher = psutil.Process(pid)
        for process in (launcher, *launcher.children(recursive=True)):
            with suppress(psutil.Error):
                rows = process.net_connections(kind="tcp")
                found |= {row.laddr.port for row in rows if row.status == psutil.CONN_LISTEN}
    return found


def main() -> None:
    pid, attacked = int(sys.argv[1]), set[int]()
    with socket.create_server(("127.0.0.1", 0)) as trap:
        attacker = Attacker(trap.getsockname()[1])
        own = {trap.getsockname()[1]}
        print("ready", flush=True)
        while not select.select([sys.stdin], [], [], 0.2)[0]:
            for port in listening(pid) - own:
                if port not in attacked:  # it waits for an answer until the run ends its connection
                    threading.Thread(target=attacker.as_torch, args=(port,), daemon=True).start()
                attacked.add(port)
                attacker.attack(port)
        if select.select([trap], [], [], 0)[0]:
            attacker.taken.append("a rank came to the attacker's address")
    print(
        json.dumps({"rounds": attacker.rounds, "ports": len(attacked), "taken": attacker.taken}),
        flush=True,
    )


if __name__ == "__main__":
    main()
