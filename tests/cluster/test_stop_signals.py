"""Counted stop signals, without a process that they would end."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from digenrl.cluster import signals
from digenrl.cluster.signals import STOPS, StopSignals, handled_signals


class Ended(Exception):
    """The process would be gone."""


def test_signals_of_one_second_are_one_and_the_one_beyond_patience_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def gone(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(signals.time, "monotonic", lambda: now)
    monkeypatch.setattr(os, "_exit", gone)
    reading, writing = os.pipe()
    seen = StopSignals()
    assert (seen.count, seen.number, seen.exit_code) == (0, 0, 0)
    seen._handle_signal(signal.SIGTERM, None)  # in the first second of the clock, too
    now = 0.9
    seen._handle_signal(signal.SIGHUP, None)
    assert (seen.count, seen.number, seen.exit_code) == (1, 15, 143)
    now = 1.0
    seen._handle_signal(signal.SIGINT, None)
    assert (seen.count, seen.number, seen.exit_code) == (2, 15, 143)
    seen.leave_after(1, writing, "gone by {signal}")
    now = 2.0
    seen._handle_signal(signal.SIGINT, None)
    now = 3.0
    seen.count_all()
    seen._handle_signal(signal.SIGINT, None)
    seen.leave_after(0, writing, "gone by {signal}")
    now = 4.0
    with pytest.raises(Ended, match="130"):
        seen._handle_signal(signal.SIGINT, None)
    assert os.read(reading, 99) == b"gone by SIGINT\n"
    os.close(writing)
    os.close(reading)
    now = 5.0
    with pytest.raises(Ended, match="129"):  # nobody reads it any more
        seen._handle_signal(signal.SIGHUP, None)
    assert [seen.requests.get() for _ in range(seen.count)] == [15, 2, 2, 2, 2, 1]


def test_a_request_is_waited_for_in_short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept, pending = [0.0], list[float](), {0.5: signal.SIGTERM}

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    def due() -> set[signal.Signals]:
        return {signal.SIGCHLD, *(number for at, number in pending.items() if at <= now[0])}

    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(signals.time, "sleep", sleep)
    monkeypatch.setattr(signal, "sigpending", due)
    monkeypatch.setattr(signal, "sigwait", lambda numbers: numbers.pop())
    assert signals.wait_for_request(0.25) is None
    assert slept == pytest.approx([0.1, 0.1, 0.05])
    assert signals.wait_for_request(9.0) == signal.SIGTERM
    assert now[0] == pytest.approx(0.55)


def test_handlers_are_those_of_the_innermost_context_and_nohup_is_obeyed() -> None:
    def handlers() -> list[object]:
        return [signal.getsignal(number) for number in STOPS]

    hup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    before, one = handlers(), StopSignals()
    with one:
        inside = handlers()
        assert inside == [one._handle_signal] * len(STOPS)
        with one, StopSignals() as other:
            assert handlers() == [other._handle_signal] * len(STOPS)
        assert handlers() == inside
    assert handlers() == before
    assert handled_signals() == STOPS
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert set(STOPS) - set(handled_signals()) == {signal.SIGHUP}
    finally:
        signal.signal(signal.SIGHUP, hup)


def test_output_that_nobody_reads_is_dropped_by_the_descriptor_too() -> None:
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        for number in (1, 2):
            os.dup2(writing, number)
        os.close(writing)
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
        signals.ignore_closed_terminal()
        try:
            assert sys.stdout.write("read") == 4
            sys.stdout.flush()
            assert os.read(reading, 9) == b"read"
            os.close(reading)
            for stream in (sys.stdout, sys.stderr):
                print("to nobody", file=stream, flush=True)
            os.write(1, b"from C")
            os.write(2, b"from C")
        finally:
            os._exit(int(sys.exc_info()[0] is not None))
    os.close(writing)
    os.close(reading)
    assert os.waitpid(child, 0)[1] == 0
