"""Progress of ranks, as the launcher judges it; the clock is the test's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from digenrl.cluster import vitals
from digenrl.cluster.hangs import HangDetector
from digenrl.cluster.limits import Limits
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
            if found := detector.find_hanging_ranks(
                {rank: progress.current_stretches() for rank, progress in enumerate(ranks)}
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


def test_a_rank_that_is_gone_gives_the_others_no_more_time(judged: Judge) -> None:
    gone, other = known("decode"), known("decode")
    with gone.stage("decode"), other.stage("decode"):
        for _ in range(4):
            assert judged(25, other, gone) == {}
            other.mark_progress()
        # 100 s of a rank that finished nothing; ten times 24 s of one that did
        assert judged(235, other) == {}
        assert "raise limits.stage_factor" in judged(20, other)[0]


def test_ticks_and_nested_stages_are_progress(judged: Judge) -> None:
    rank = known("train", "eval", "score digits")
    with rank.stage("train"):
        for _ in range(5):
            assert judged(20, rank) == {}
            rank.mark_progress()
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
        assert [stretch.stage for stretch in rank.current_stretches()] == ["wait reward"]


def test_an_observer_who_was_suspended_finds_nobody_hanging(judged: Judge) -> None:
    rank = known("decode")
    with rank.stage("decode"):
        for _ in range(10):
            assert judged(1, rank, jump=10_000.0) == {}
        assert judged(30, rank) != {}


def test_without_a_factor_nobody_is_judged(judged: Judge) -> None:
    with (rank := known("decode")).stage("decode"):
        assert judged(10_000, rank, limits=replace(LIMITS, stage_factor=None)) == {}
