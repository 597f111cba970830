"""Two machines in one: network namespaces, joined by two cables, whose bytes the kernel counts."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")
CLONE_NEWNET = 0x40000000


@contextmanager
def two_machines() -> Iterator[tuple[str, str]]:
    """Names of two namespaces with the interfaces front0 (10.77.0.1 and 10.77.0.2) and data0 (fd77::1 and fd77::2). The
    test is skipped where they cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (Debian package iproute2)")
    one, two = f"dgrl{os.getpid()}a", f"dgrl{os.getpid()}b"
    steps = [
        f"netns add {one}",
        f"netns add {two}",
        *(f"link add {cable} netns {one} type veth peer name {cable} netns {two}" for cable in ("front0", "data0")),
        *(f"-n {ns} addr add 10.77.0.{i}/24 dev front0" for i, ns in ((1, one), (2, two))),
        *(f"-n {ns} addr add fd77::{i}/64 dev data0 nodad" for i, ns in ((1, one), (2, two))),
        *(f"-n {ns} link set {dev} up" for ns in (one, two) for dev in ("front0", "data0", "lo")),
    ]
    try:
        for step in steps:
            made = subprocess.run(["ip", *step.split()], capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"ip {step}: {made.stderr.strip()}")
        yield one, two
    finally:
        for ns in (one, two):
            subprocess.run(["ip", "netns", "del", ns], capture_output=True, check=False)


def inside(namespace: str, call: Callable[[], T]) -> T:
    """`call()` in a thread of that namespace, where its sockets and the threads that it starts stay."""

    def enter() -> T:
        with Path("/var/run/netns", namespace).open() as handle:
            if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns {namespace}")
        return call()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(enter).result()


def bytes_sent(namespace: str, interface: str) -> int:
    """By this interface of a namespace, since it was made."""
    command = ["ip", "-n", namespace, "-s", "-j", "link", "show", interface]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])
