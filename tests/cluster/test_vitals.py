"""Progress as ranks mark it, and signs of life."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from digenrl.cluster import leaving, timers, vitals
from digenrl.cluster.control import Control
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.limits import Limits
from digenrl.cluster.store import StoreClient, StoreServer
from digenrl.cluster.world import Session, World
from digenrl.record.progress import Progress


def test_stages_of_a_thread_may_overlap() -> None:
    rank = Progress()
    outer, inner = rank.stage("train"), rank.stage("optimizer")
    with outer:
        inner.__enter__()
    assert [stretch.stage for stretch in rank.current_stretches()] == ["optimizer"]
    inner.__exit__(None, None, None)
    assert [stretch.stage for stretch in rank.current_stretches()] == [""]


def test_a_rank_counts_the_graphs_that_it_compiles() -> None:
    seen = [vitals.process_facts(Progress())["graphs"]]
    plain = torch.compile(lambda values: values + 1, backend="eager", dynamic=False)
    for rows in (2, 2, 3):
        plain(torch.zeros(rows))
        seen.append(vitals.process_facts(Progress())["graphs"] - seen[0])
    assert seen[1:] == [1, 1, 2]
    rank = Progress()
    assert vitals.process_facts(rank)["peak_gib"] == {}
    rank.peaks.update({"train": 3 << 29, "decode": 123_456_789})
    assert vitals.process_facts(rank)["peak_gib"] == {"decode": 0.115, "train": 1.5}
    assert (vitals.facts_key(3), vitals.watch_key(3)) == ("facts/3", "watch/3")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cgroup/a/memory.events": "low 0\noom 7\noom_kill 3\n", "vmstat": "oom_kill 99\n"}, 3),
        ({"cgroup/memory/b/memory.oom_control": "under_oom 0\noom_kill 2\n"}, 2),
        ({"cgroup/a/memory.events": "low 0\n", "vmstat": "nr_free 5\noom_kill 11\n"}, 11),
        ({}, 0),
    ],
)
def test_out_of_memory_kills_are_those_of_the_own_cgroup_or_else_of_the_machine(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in ({"cgroups": "0::/a\n4:memory:/b\n"} | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    there = {
        "/proc/self/cgroup": tmp_path / "cgroups",
        "/proc/vmstat": tmp_path / "vmstat",
    }

    def path(text: str) -> Path:
        return there.get(text) or tmp_path / text.removeprefix("/sys/fs/")

    monkeypatch.setattr(vitals, "Path", path)
    assert vitals.oom_kills() == expected


@pytest.mark.processes
@pytest.mark.parametrize("harm", [None, signal.SIGSTOP, signal.SIGKILL])
def test_a_monitor_leaves_no_process_behind(harm: signal.Signals | None, tmp_path: Path) -> None:
    monitor = vitals.LauncherMonitor((tmp_path / "why").write_text)
    process = psutil.Process(monitor._process.pid)
    if harm is not None:
        process.send_signal(harm)
    began = time.monotonic()
    monitor.stop()
    assert time.monotonic() - began < 5.0
    assert not psutil.pid_exists(process.pid)
    assert not (tmp_path / "why").exists(), "the launcher is well"
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(monitor._write)


@pytest.mark.parametrize(
    ("rank", "number", "key"),
    [
        (0, signal.SIGTERM, "signal"),
        (1, signal.SIGTERM, "ask/1"),
        (1, signal.SIGINT, "signal"),
        (5, signal.SIGINT, "ask/5"),
    ],
)
def test_a_heartbeat_says_what_a_rank_does_and_passes_signals_on(
    rank: int, number: int, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout may leave at some signals, and a rollout that joined at all."""
    handshake, pauses, due = Handshake(rank=rank), list[float](), [number]
    server = StoreServer(socket.create_server(("127.0.0.1", 0)), handshake)
    control = Control(StoreClient(server.host, server.port, handshake), -1)
    progress = Progress()
    limits = Limits(abort_s=0.5, leave_s=0.5)
    session = Session(
        server.host, server.port, handshake, tmp_path, 0.0, limits=limits, progress=progress
    )
    exits = list[int]()

    def leave(code: int) -> None:
        exits.append(code)
        session.over.set()

    monkeypatch.setattr(leaving, "os", SimpleNamespace(_exit=leave))
    earlier = threading.enumerate()  # a rank of another test may still beat

    def request(pause: float) -> int | None:
        time.sleep(0.002)
        if threading.current_thread() in earlier:
            return None
        pauses.append(pause)
        return due.pop() if due else None

    def until(key: str, wanted: Callable[[str | None], bool]) -> None:
        deadline = time.monotonic() + 20.0
        while not wanted(control.get(key)):
            assert time.monotonic() < deadline, key
            time.sleep(0.002)

    monkeypatch.setattr(vitals, "wait_for_request", request)
    world = World(rank, trainers=1, rollouts=1)
    with progress.stage("decode"):
        progress.said = "decoding"
        progress.peaks["decode"] = 3 << 29
        vitals.start_heartbeat(session, world)
        until(key, lambda value: value == str(int(number)))
        until(f"facts/{rank}", lambda value: value == json.dumps(vitals.process_facts(progress)))
        until(f"beat/{rank}", lambda value: json.loads(value or "[0]")[0] > 3)
        (doing,) = json.loads(control.get(f"beat/{rank}") or "")[1]
    assert {key, "signal", f"ask/{rank}"} - {key} == {
        other for other in ("signal", f"ask/{rank}") if control.get(other) is None
    }
    assert "decode" in doing
    assert control.get(f"state/{rank}") == "decoding"
    assert pauses[:3] == [1.0, *[0.1 if key != "signal" else 1.0] * 2]
    assert not session.leave.is_set()
    control.set(f"leave/{rank}", "signal")
    if rank:
        assert session.leave.wait(20.0)
    server.exclude_rank(rank)
    server.close()
    for thread in threading.enumerate():
        if thread.name == f"heartbeat-{rank}":
            thread.join(20.0)
            assert not thread.is_alive()
    assert exits == [1], "the store is gone, and nothing else ends this process"


def test_a_rank_that_is_asked_for_its_stacks_writes_them_to_its_log(tmp_path: Path) -> None:
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(write, 2)
        session = Session("127.0.0.1", 1, Handshake(rank=0), tmp_path, 0.0)
        vitals.start_heartbeat(session, World(0, trainers=1, rollouts=0))
        signal.raise_signal(vitals.STACKS)
        os._exit(0)
    os.close(write)
    assert os.waitpid(child, 0)[1] == 0
    with os.fdopen(read) as log:
        assert "test_a_rank_that_is_asked_for_its_stacks" in log.read()


@pytest.mark.parametrize(
    ("script", "looks", "cause", "killed"),
    [
        ({}, 7, "stopped responding (it is suspended)", [(77, signal.SIGKILL)]),
        ({2: 50.0}, 6, "stopped responding (it is suspended)", [(77, signal.SIGKILL)]),
        ({4: b""}, 4, "was killed", []),
        ({4: b"."}, 4, None, []),
        ({9: "orphan"}, 9, "was killed", []),
    ],
    ids=["suspended", "both slept", "gone", "well", "another has its number"],
)
def test_a_monitor_judges_the_launcher_by_its_pipe_and_its_state(
    script: dict[int, Any],
    looks: int,
    cause: str | None,
    killed: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look takes half a second. One that took 50 s, as the monitor itself slept, counts as one."""
    now, seen, told, done = [0.0], [0], list[str](), list[Any]()

    def select(reading: list[int], *_: Any) -> tuple[list[int], list[int], list[int]]:
        seen[0] += 1
        event = script.get(seen[0])
        now[0] += event if isinstance(event, float) else _[2]
        ready = isinstance(event, bytes) or event == "orphan"
        return (reading if ready else []), [], []

    def leave(code: int) -> None:
        raise SystemExit(code)

    monitor = object.__new__(vitals.LauncherMonitor)
    monitor._suspended_s, monitor._name = 3.0, "it"
    monitor._read, monitor._write = os.pipe()
    parent = 1 if "orphan" in script.values() else 77
    monkeypatch.setattr(vitals.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(vitals.select, "select", select)
    monkeypatch.setattr(vitals, "is_suspended", lambda pid: pid == 77)
    monkeypatch.setattr(vitals.os, "read", lambda *_: script.get(seen[0]) == b"." and b".")
    monkeypatch.setattr(vitals.os, "getppid", lambda: parent)
    monkeypatch.setattr(vitals.os, "kill", lambda *to: done.append(to))
    monkeypatch.setattr(vitals.os, "_exit", leave)
    with pytest.raises(SystemExit) as ended:
        monitor._watch_launcher(77, told.append)
    monkeypatch.undo()
    os.close(monitor._read)
    assert (ended.value.code, seen[0], done) == (0, looks, killed)
    assert told == ([] if cause is None else [f"it (process 77) {cause}"])
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(monitor._write)


def test_a_condition_is_timed_by_the_observers_own_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(vitals.time, "monotonic", lambda: now[0])
    timer, found = vitals.ConditionTimer(1.0), []
    for pause, true in (
        (0.25, True),
        (0.5, True),
        (9.0, True),
        (1.0, False),
        (0.5, True),
        (1.0, True),
    ):
        now[0] += pause
        found.append(timer.observe(true))
    assert found == [0.25, 0.75, 1.75, 0.0, 0.5, 1.5]
    assert timer.seconds == 1.5


def test_a_process_is_suspended_works_or_is_gone() -> None:
    if (child := os.fork()) == 0:
        while True:
            signal.pause()
    try:
        assert not vitals.is_suspended(child)
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        assert vitals.is_suspended(child)
        assert 0.0 <= vitals.cpu_seconds(child) < 5.0
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for gone in (child, None):
        assert not vitals.is_suspended(gone)
        assert vitals.cpu_seconds(gone) == 0.0
    used = psutil.Process().cpu_times()
    assert (
        used.user + used.system <= vitals.cpu_seconds(os.getpid()) < used.user + used.system + 5.0
    )


def test_processor_time_is_a_processs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """User and system; not that of its children."""
    process = SimpleNamespace(cpu_times=lambda: (1.0, 2.0, 4.0, 8.0))
    monkeypatch.setattr(psutil, "Process", lambda pid: process)
    assert vitals.cpu_seconds(77) == 3.0


def test_a_rank_that_hangs_writes_its_stacks_before_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of another machine cannot be asked. What stopped responding is not asked either."""
    handshake, now = Handshake(), [0.0]
    server = StoreServer(socket.create_server(("127.0.0.1", 0)), handshake)
    control = Control(StoreClient(server.host, server.port, handshake), -1)
    asked, slept, seen = list[Any](), list[float](), list[Any]()
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=slept.append)
    monkeypatch.setattr(vitals, "time", clock)
    monkeypatch.setattr(timers, "time", clock)
    monkeypatch.setattr(vitals.os, "kill", lambda *to: asked.append(to))
    monkeypatch.setattr(vitals, "is_suspended", lambda pid: pid == 102)
    monkeypatch.setattr(vitals, "cpu_seconds", lambda pid: 1.0)
    limits = Limits(suspended_s=3.0, silent_s=8.0, stage_floor_s=40.0)
    monitor = vitals.HeartbeatMonitor(control, {0: 100, 1: None, 2: 102}, limits)
    stuck = {0: "hangs in decode", 1: "hangs in train", 2: "hangs"}
    judge: Any = SimpleNamespace(
        find_hanging_ranks=lambda doing: (
            seen.append(dict(doing)) or (stuck if now[0] >= 4.0 else {})
        )
    )
    monitor._hangs = judge
    stretch = Progress()
    with stretch.stage("decode"):
        (doing,) = stretch.current_stretches()
    control.set("beat/0", json.dumps([1, [astuple(doing)]]))
    found = []
    for _ in range(9):
        now[0] += 0.5
        found.append(monitor.find_unresponsive([0, 1, 2]))
    server.close()
    suspended = {2: "stopped responding (process 102 is suspended)"}
    assert found[:7] == [{}] * 7
    assert found[7] == suspended
    stacks = "hangs in decode; its log has the stacks of its threads"
    assert found[8] == suspended | {0: stacks, 1: "hangs in train"}
    assert seen == [{0: [doing], 1: [], 2: []}] * 5, "once a second"
    assert (asked, slept) == ([(100, signal.SIGUSR2)], [0.2])


def test_marking_costs_microseconds() -> None:
    rank = Progress()
    began = time.perf_counter()
    for _ in range(10_000):
        with rank.stage("decode"):
            rank.mark_progress()
    each = (time.perf_counter() - began) / 10_000
    print(f"a stage with one tick: {1e6 * each:.1f} microseconds")
    assert each < 1e-3, "a thousand times less than a denoising step"


class Over(Exception):
    """Instead of the end of this process."""


@pytest.mark.parametrize("gone", [False, True], ids=["aborted", "no store"])
def test_a_rank_leaves_a_run_that_is_over_after_its_limits_and_says_why(
    gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The rank counts its own looks, one a second. A look after a pause of an hour counts two
    seconds."""
    now, told, said = [100.0], dict[str, str](), list[str]()

    def exit_(code: int) -> None:
        raise Over(code)

    monkeypatch.setattr(leaving, "os", SimpleNamespace(_exit=exit_))
    monkeypatch.setattr(timers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    session = Session("", 0, Handshake(), tmp_path, 0.0, limits=Limits(abort_s=4.0, leave_s=10.0))
    session.progress.said = "train"
    end = leaving.Leaving(session, World(1, 2, 0), said.append, more_s=2.0)
    store: Any = None if gone else SimpleNamespace(set=told.__setitem__)

    def look(cause: str | None, seconds: float = 1.0) -> None:
        now[0] += seconds
        end.leave_when_overdue(cause, store)

    for _ in range(50):
        look(None)
    look("rank 0 (trainer) died", 3600.0)
    for _ in range(14):
        look("another cause")
    with pytest.raises(Over, match="1"):
        look("another cause")
    assert said == ["rank 0 (trainer) died"]
    assert told == ({} if gone else {"left/1": "1"})
    printed = capfd.readouterr().err
    assert "rank 1 (trainer) is still in stage train, 16 s after the end of the run" in printed
    assert "and leaves: rank 0 (trainer) died" in printed
    assert "most recent call first" in printed
    session.over.set()
    look("another cause")


def test_last_words_that_block_keep_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exit_(code: int) -> None:
        raise Over(code)

    never = threading.Event()
    monkeypatch.setattr(leaving, "os", SimpleNamespace(_exit=exit_))
    monkeypatch.setattr(leaving, "_LAST_WORDS_S", 0.1)
    session = Session("", 0, Handshake(), tmp_path, 0.0, limits=Limits(abort_s=0.1, leave_s=0.1))
    end = leaving.Leaving(session, World(0, 1, 0), lambda cause: bool(never.wait()) or None)
    time.sleep(0.15)
    end.leave_when_overdue("gone")
    time.sleep(0.15)
    with pytest.raises(Over):
        end.leave_when_overdue("gone")
    never.set()
