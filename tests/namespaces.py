"""Two machines in one: network namespaces, joined by two cables, whose bytes the kernel counts."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")
CLONE_NEWNET = 0x40000000


@contextmanager
def two_machines() -> Iterator[tuple[str, str]]:
    """Names of two namespaces with the interfaces front0 (10.77.0.1 and 10.77.0.2) and data0
    (fd77::1 and fd77::2). The test is skipped where they cannot be made."""
    one, two = f"dgrl{os.getpid()}a", f"dgrl{os.getpid()}b"
    steps = [
        f"netns add {one}",
        f"netns add {two}",
        *(
            f"link add {cable} netns {one} type veth peer name {cable} netns {two}"
            for cable in ("front0", "data0")
        ),
        *(f"-n {ns} addr add 10.77.0.{i}/24 dev front0" for i, ns in ((1, one), (2, two))),
        *(f"-n {ns} addr add fd77::{i}/64 dev data0 nodad" for i, ns in ((1, one), (2, two))),
        *(f"-n {ns} link set {dev} up" for ns in (one, two) for dev in ("front0", "data0", "lo")),
    ]
    try:
        for step in steps:
            try:
                _ip(step)
            except NotHere as error:
                pytest.skip(str(error))
        yield one, two
    finally:
        for ns in (one, two):
            with suppress(NotHere):
                _ip(f"netns del {ns}")


def inside(namespace: str, call: Callable[[], T]) -> T:
    """`call()` in a thread of that namespace, where its sockets and the threads that it starts
    stay."""

    def enter() -> T:
        with Path("/var/run/netns", namespace).open() as handle:
            if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns {namespace}")
        return call()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(enter).result()


class NotHere(RuntimeError):
    """This machine does not permit namespaces. The message says what did not work."""


@dataclass
class Cable:
    """A cable between this machine and a namespace, which has an interface of the same name."""

    namespace: str
    interface: str
    host: str
    """Address of this machine's end."""
    lossy: str | None = None
    """Why packets cannot be delayed and lost (the kernel lacks netem): then a slow cable is a thin
    one alone."""

    def cut(self, seconds: float) -> None:
        """Let nothing pass for `seconds`: this machine's end has no carrier."""
        _ip(f"-n {self.namespace} link set {self.interface} down")
        time.sleep(seconds)
        _ip(f"-n {self.namespace} link set {self.interface} up")

    def slow(self, seconds: float) -> None:
        """Carry 4 Mbit/s with 50 ms and 2 % loss each way, for `seconds`. Without netem, only the
        rate of 4 Mbit/s is set (the kernel's token bucket filter)."""
        try:
            self._shape("netem delay 50ms loss 2% rate 4mbit")
        except NotHere as error:
            self.lossy = str(error)
            self._shape("tbf rate 4mbit burst 128kb latency 200ms")
        time.sleep(seconds)
        self._shape("")

    def _shape(self, discipline: str) -> None:
        """What queues at both ends; "": as before."""
        for prefix in ([], ["ip", "netns", "exec", self.namespace]):
            what = ["replace" if discipline else "del", "dev", self.interface, "root"]
            _run([*prefix, "tc", "qdisc", *what, *discipline.split()])


@contextmanager
def cable() -> Iterator[Cable]:
    """To a new namespace.

    Raises:
        NotHere: it cannot be made.
    """
    pid = os.getpid()
    name, net = f"dgrl{pid}", f"10.78.{pid % 250}"
    try:
        _ip(f"netns add {name}")
        _ip(f"link add {name} type veth peer name {name} netns {name}")
        for where, number in (("", 1), (f"-n {name} ", 2)):
            _ip(f"{where}addr add {net}.{number}/24 dev {name}")
            _ip(f"{where}link set {name} up")
        _ip(f"-n {name} link set lo up")
        yield Cable(name, name, f"{net}.1")
    finally:
        for step in (f"netns del {name}", f"link del {name}"):
            with suppress(NotHere):
                _ip(step)


def _ip(step: str) -> None:
    _run(["ip", *step.split()])


def _run(command: list[str]) -> None:
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise NotHere(f"needs the command {command[0]} (Debian package iproute2)") from error
    if made.returncode:
        raise NotHere(f"{' '.join(command)}: {made.stderr.strip()}")


def bytes_sent(namespace: str | None, interface: str) -> int:
    """Return the bytes that an interface of a namespace has sent since it was made. None: this
    machine's own."""
    command = [
        "ip",
        *(["-n", namespace] if namespace else []),
        "-s",
        "-j",
        "link",
        "show",
        interface,
    ]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])
