"""Signals that a process holds back and takes when it is ready."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection

import pytest

from digenrl.cluster.signals import signals_blocked, wait_for_request

pytestmark = pytest.mark.processes

WAIT_S = 0.02
"""One wait of the child; shorter than a pause, so that waits expire inside pauses."""


def _report_requests(sending: Connection) -> None:
    """Send each signal that arrives; return after SIGTERM."""
    number = None
    sending.send("ready")
    while number != signal.SIGTERM:
        if (number := wait_for_request(WAIT_S)) is not None:
            sending.send(int(number))


def test_a_pause_is_no_signal_and_a_signal_during_a_pause_is_one() -> None:
    """CPython's sigtimedwait() returns an arbitrary number after such a pause."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_report_requests, args=(sending,))
    with signals_blocked():
        child.start()
    sending.close()
    assert child.pid is not None
    draw = random.Random(0)
    try:
        assert receiving.recv() == "ready"
        for pause in range(20):
            os.kill(child.pid, signal.SIGSTOP)
            if pause == 10:
                os.kill(child.pid, signal.SIGUSR1)
            time.sleep(draw.uniform(0.5, 3.0) * WAIT_S)
            os.kill(child.pid, signal.SIGCONT)
            time.sleep(draw.uniform(0.0, 2.0) * WAIT_S)
        os.kill(child.pid, signal.SIGTERM)
        child.join(20.0)
        assert child.exitcode == 0
        assert [receiving.recv(), receiving.recv()] == [signal.SIGUSR1, signal.SIGTERM]
        with pytest.raises(EOFError):
            receiving.recv()
    finally:
        child.kill()
        child.join()
