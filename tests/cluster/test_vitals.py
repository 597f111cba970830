"""Progress as ranks mark it, and as the launcher judges it; the clock is the test's."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from digenrl.cluster import vitals
from digenrl.cluster.limits import Limits
from digenrl.cluster.vitals import HangDetector
from digenrl.record.progress import Progress

LIMITS = Limits(stage_factor=10.0, stage_floor_s=30.0, start_s=100.0)
Judge = Callable[..., dict[int, str]]


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Judge:
    """A detector that observes every second of the clock that the test moves: (seconds, each
    activity) -> verdicts."""
    now = 0.0
    monkeypatch.setattr(vitals.time, "monotonic", lambda: now)
    detectors: dict[Limits, HangDetector] = {}

    def observe(
        seconds: int, *ranks: Progress, limits: Limits = LIMITS, jump: float = 0.0
    ) -> dict[int, str]:
        nonlocal now
        detector = detectors.setdefault(limits, HangDetector(limits))
        now += jump
        for _ in range(seconds):
            if found := detector.hanging(
                {rank: progress.now() for rank, progress in enumerate(ranks)}
            ):
                return found
            now += 1.0
        return {}

    return observe


def known(*stages: str) -> Progress:
    """A rank that has finished each of `stages` once."""
    progress = Progress()
    for stage in stages:
        with progress.stage(stage):
            pass
    return progress


def test_a_stretch_has_the_floor_and_ten_times_the_longest_of_its_stage_on_any_rank(
    judged: Judge,
) -> None:
    slow, fast = known("decode"), known("decode")
    with fast.stage("decode"):
        assert judged(30, slow, fast) == {}
        found = judged(5, slow, fast)
    assert found == {1: "hangs in stage decode: no progress for 31 s; "
                        "raise limits.stage_floor_s if it only needs longer"}  # fmt: skip
    with slow.stage("wait tail"), fast.stage("decode"):
        assert judged(300, slow, fast) == {}, "31 s, times ten"
        assert "raise limits.stage_factor" in judged(20, slow, fast)[1]


def test_ticks_and_nested_stages_are_progress(judged: Judge) -> None:
    rank = known("train", "eval", "score digits")
    with rank.stage("train"):
        for _ in range(5):
            assert judged(20, rank) == {}
            rank.tick()
    with rank.stage("eval"):
        for _ in range(5):
            assert judged(20, rank) == {}
            with rank.stage("score digits"):
                assert judged(20, rank) == {}


def test_first_stretches_and_work_outside_of_stages_have_the_start_limit(judged: Judge) -> None:
    rank = Progress()
    assert judged(100, rank) == {}
    assert judged(5, rank)[0].startswith(
        "hangs in no stage (its start, a callback, a logger): no progress for 101 s"
    )
    with rank.stage("decode"):
        assert judged(100, rank) == {}
        assert "stage decode: no progress for 101 s; raise limits.start_s" in (judged(5, rank)[0])


def test_who_waits_is_excused_while_anybody_works(judged: Judge) -> None:
    trainer, rollout = known("train"), known("score digits")
    with trainer.stage("wait tail"), rollout.stage("wait weights"):
        assert judged(30, trainer, rollout) == {}
    with trainer.stage("wait tail"):
        for _ in range(20):
            with rollout.stage("generate"):
                assert judged(20, trainer, rollout) == {}
        with rollout.stage("wait weights"):
            found = judged(60, trainer, rollout)
    assert list(found) == [0]
    assert "all ranks wait for each other (rank 0: wait tail, rank 1: wait weights)" in found[0]


def test_a_scorer_beside_a_waiting_rank_is_judged_by_itself(judged: Judge) -> None:
    rank, over = known("score digits"), threading.Event()
    begun = threading.Event()

    def score() -> None:
        with rank.stage("score digits"):
            begun.set()
            over.wait(10)

    scorer = threading.Thread(target=score, name="scorer")
    scorer.start()
    assert begun.wait(10)
    with rank.stage("wait reward"):
        found = judged(60, rank)
        assert found[0].startswith(
            "hangs in stage score digits (thread scorer): no progress for 31 s"
        )
        over.set()
        scorer.join()
        assert [stretch.stage for stretch in rank.now()] == ["wait reward"]


def test_an_observer_who_was_suspended_finds_nobody_hanging(judged: Judge) -> None:
    rank = known("decode")
    with rank.stage("decode"):
        for _ in range(10):
            assert judged(1, rank, jump=10_000.0) == {}
        assert judged(30, rank) != {}


def test_without_a_factor_nobody_is_judged(judged: Judge) -> None:
    with (rank := known("decode")).stage("decode"):
        assert judged(10_000, rank, limits=replace(LIMITS, stage_factor=None)) == {}


def test_stages_of_a_thread_may_overlap() -> None:
    rank = Progress()
    outer, inner = rank.stage("train"), rank.stage("optimizer")
    with outer:
        inner.__enter__()
    assert [stretch.stage for stretch in rank.now()] == ["optimizer"]
    inner.__exit__(None, None, None)
    assert [stretch.stage for stretch in rank.now()] == [""]


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
def test_a_monitor_leaves_no_process_behind(harm: signal.Signals | None) -> None:
    monitor = vitals.LauncherMonitor(lambda cause: None)
    process = psutil.Process(monitor._process.pid)
    if harm is not None:
        process.send_signal(harm)
    began = time.monotonic()
    monitor.stop()
    assert time.monotonic() - began < 5.0
    assert not psutil.pid_exists(process.pid)


def test_marking_costs_microseconds() -> None:
    rank = Progress()
    began = time.perf_counter()
    for _ in range(10_000):
        with rank.stage("decode"):
            rank.tick()
    each = (time.perf_counter() - began) / 10_000
    print(f"a stage with one tick: {1e6 * each:.1f} microseconds")
    assert each < 1e-3, "a thousand times less than a denoising step"
