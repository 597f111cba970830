"""Stop signals: how users, terminals and schedulers ask a process to end.

    SIGINT   Ctrl-C                    SIGTERM  kill, timeout, systemd, scancel, torchrun, a node that drains
    SIGQUIT  Ctrl-\\                    SIGHUP   a closed terminal, a dropped ssh connection
                                       SIGUSR1  SLURM, before it takes a node away

A signal may reach the process that the user started, one rank, or the whole process group. The
launcher decides what follows. A rank blocks the signals and passes them on, so a signal to one rank
stops the run just as one to the launcher does. There is one exception: a signal of `LEAVES` to a
single rollout lets that rollout leave, and the run goes on.
"""  # noqa: E501

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from types import FrameType
from typing import Self

LEAVES = (signal.SIGTERM, signal.SIGUSR1)
STOPS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, *LEAVES)
_NEVER = 1 << 30
_PR_SET_PDEATHSIG = 1
_ONE_REQUEST_S = 1.0
"""Seconds within which several signals are one request. `timeout` sends two, and a closing terminal
may."""
_LOOK_EVERY_S = 0.1
"""Seconds between two looks for a pending signal."""


def handled_signals() -> tuple[signal.Signals, ...]:
    """Return the stop signals that this process handles: all of `STOPS`, but not SIGHUP under
    nohup."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in STOPS if not (ignored and number == signal.SIGHUP))


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send signal `number` to this process when its parent ends (Linux alone)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block all signals of `STOPS` while the context is open.

    A process that is forked inside blocks them for good, and so do its own children. A signal to
    the whole group then leaves a scorer's helper processes to finish the step.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_for_request(seconds: float) -> int | None:
    """Wait up to `seconds` for a signal that this process obeys and holds back; return its number,
    or None.

    The signal is consumed. All threads must hold it back (`signals_blocked`), and one thread at
    most may wait.
    """
    deadline = time.monotonic() + seconds
    while True:
        # signal.sigtimedwait() is no way to wait: CPython returns uninitialised memory as the
        # signal when a pause of the process (Ctrl-Z, SIGSTOP, a debugger) lasts beyond the timeout.
        # sigwait() of what is pending cannot fail.
        if pending := signal.sigpending() & set(handled_signals()):
            return signal.sigwait(pending)
        if (left := deadline - time.monotonic()) <= 0.0:
            return None
        time.sleep(min(_LOOK_EVERY_S, left))


class StopSignals:
    """Counts stop signals while its context is open. One more than `patience` ends the process at
    once.

    The context may be entered again inside itself. The handler may interrupt any code, because it
    only counts.
    """

    def __init__(self) -> None:
        self.count = 0
        self.number = 0
        """Number of the first signal; 0 = none yet."""
        self.requests: SimpleQueue[int] = SimpleQueue()
        """Counted signals, for a thread that waits for one."""
        self._at = -_ONE_REQUEST_S
        self._patience, self._stream, self._last_words = _NEVER, 2, ""

    @property
    def exit_code(self) -> int:
        """128 + the first signal; 0 without one."""
        return 128 + self.number if self.number else 0

    def leave_after(self, patience: int, stream: int, last_words: str) -> None:
        """Count `patience` more signals from now on, and end the process at the next one.

        The process then writes `last_words` to the file descriptor `stream`, with the signal's name
        for "{signal}".
        """
        self._patience, self._stream, self._last_words = self.count + patience, stream, last_words

    def count_all(self) -> None:
        """Count all signals from now on; none ends the process."""
        self._patience = _NEVER

    def __enter__(self) -> Self:
        # A stack of former handlers, because the context may be entered again inside itself.
        self._old = [
            *getattr(self, "_old", []),
            {number: signal.signal(number, self._handle_signal) for number in handled_signals()},
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._old.pop().items():
            signal.signal(number, handler)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if (now := time.monotonic()) < self._at + _ONE_REQUEST_S:
            return
        self._at, self.count, self.number = now, self.count + 1, self.number or number
        # A SimpleQueue may be filled inside a signal handler; a Queue could deadlock on its own
        # lock.
        self.requests.put(number)
        if self.count > self._patience:
            words = self._last_words.format(signal=signal.Signals(number).name)
            try:
                # os.write and os._exit, because the handler may have interrupted print or a lock's
                # holder.
                os.write(self._stream, f"{words}\n".encode())
            finally:
                os._exit(128 + number)


def ignore_closed_terminal() -> None:
    """Discard output to a terminal that is gone, or to a pipe that nobody reads, instead of
    failing."""

    def attempt_call(descriptor: int, call: Callable[..., object], *args: object) -> object:
        try:
            return call(*args)
        except OSError:
            # The descriptor itself, so that C code and child processes do not fail either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            return None

    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        if stream is None:  # it was closed when the process began
            continue
        for name in ("write", "flush"):
            setattr(stream, name, partial(attempt_call, descriptor, getattr(stream, name)))
