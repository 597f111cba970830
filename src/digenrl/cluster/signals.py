"""Requests to stop: the signals by which users, terminals and schedulers ask a process to end.

    SIGINT   Ctrl-C                    SIGTERM  kill, timeout, systemd, scancel, torchrun, a node that drains
    SIGQUIT  Ctrl-\\                    SIGHUP   a closed terminal, a dropped ssh connection
                                       SIGUSR1  SLURM, before it takes a node away

They reach the process that the user started, one rank, or the whole process group. The launcher decides; a rank holds
them back and passes on what it gets, so a signal to one rank alone stops the run as one to the launcher does. Only a
rollout that alone gets one of `LEAVES` leaves the run, which goes on.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from types import FrameType
from typing import Any

LEAVES = (signal.SIGTERM, signal.SIGUSR1)
STOPS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, *LEAVES)
_NEVER = 1 << 30
_ONE_REQUEST_S = 1.0
"""Signals this close are one request: `timeout` sends two, and a terminal that closes may."""
_LOOK_EVERY_S = 0.1
"""Seconds between two looks for a pending signal."""


def obeyed() -> tuple[signal.Signals, ...]:
    """Those that this process obeys: under nohup not SIGHUP."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in STOPS if not (ignored and number == signal.SIGHUP))


@contextmanager
def held_back() -> Iterator[None]:
    """Inside, no signal of `STOPS` is delivered; a process forked here holds them back for good, and so does all that
    it starts: a group's signal leaves a scorer's helpers to finish the step."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_for_request(seconds: float) -> int | None:
    """Wait up to `seconds` for a signal that this process obeys and holds back; return its number, or None.

    The signal is consumed. All threads must hold it back (`held_back`), and one thread at most may wait.
    """
    deadline = time.monotonic() + seconds
    while True:
        # signal.sigtimedwait() is no way to wait: CPython returns uninitialised memory as the signal when a pause of
        # the process (Ctrl-Z, SIGSTOP, a debugger) lasts beyond the timeout. sigwait() of what is pending cannot fail.
        if pending := signal.sigpending() & set(obeyed()):
            return signal.sigwait(pending)
        if (left := deadline - time.monotonic()) <= 0.0:
            return None
        time.sleep(min(_LOOK_EVERY_S, left))


class StopSignals:
    """Inside, requests are counted; one more than `patience` ends the process at once. May be entered again inside.

    The handler does nothing else, so it may come at any time.
    """

    def __init__(self) -> None:
        self.count = 0
        self.number = 0
        """The first signal; 0 = none yet."""
        self.requests: SimpleQueue[int] = SimpleQueue()
        """Each counted signal, for a thread that waits."""
        self._at = -_ONE_REQUEST_S
        self._patience, self._stream, self._last_words = _NEVER, 2, ""

    @property
    def exit_code(self) -> int:
        """128 + the first signal; 0 without one."""
        return 128 + self.number if self.number else 0

    def leave_after(self, patience: int, stream: int, last_words: str) -> None:
        """From now on `patience` signals are counted, and the next one ends the process with `last_words` on the file
        descriptor `stream`; "{signal}" in them is its name."""
        self._patience, self._stream, self._last_words = self.count + patience, stream, last_words

    def count_all(self) -> None:
        """From now on no signal ends the process."""
        self._patience = _NEVER

    def __enter__(self) -> StopSignals:
        self._old = [*getattr(self, "_old", []), {number: signal.signal(number, self._handle) for number in obeyed()}]
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._old.pop().items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if (now := time.monotonic()) < self._at + _ONE_REQUEST_S:
            return
        self._at, self.count, self.number = now, self.count + 1, self.number or number
        self.requests.put(number)
        if self.count > self._patience:
            words = self._last_words.format(signal=signal.Signals(number).name)
            try:
                os.write(self._stream, f"{words}\n".encode())
            finally:
                os._exit(128 + number)


def outlast_terminal() -> None:
    """What is written to a terminal that is gone, or to a pipe that nobody reads, is lost from then on; the run is
    not."""

    def attempt(descriptor: int, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)

    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        for name in ("write", "flush"):
            setattr(stream, name, partial(attempt, descriptor, getattr(stream, name)))
