"""A rank that hangs, wherever that is, is named with its stage and the key to raise, and counts as
dead."""

from __future__ import annotations

from typing import Any

import pytest

from tests.strategy.processes import TINY
from tests.test_faults import APART
from tests.training import GONE_WITHIN_S, assert_failed, fault, watch

pytestmark = [pytest.mark.processes, pytest.mark.alone]

IMPATIENT = (*APART, "limits.stage_floor_s=5", "limits.start_s=60", "max_rl_steps=4")
"""Ranks 0 and 1 train, 2 and 3 generate."""
SLEEPER = (
    "allow_targets=[tests]",
    "reward.rewards.judge_a.scorer._target_=tests.strategy.faults.Sleeper",
)
EVALUATION = (
    "callbacks.evaluation.samples_per_prompt=2",
    "callbacks.evaluation.max_prompts=6",
    "allocation.evaluation=trainers",
)


@pytest.mark.slow  # the watch itself: tests/cluster/test_watch.py
def test_a_scorer_that_never_returns_is_a_rollouts_death_and_a_disk_a_trainers(
    running: Any,
) -> None:
    """The run goes on with rank 3, until rank 0 cannot save what comes after; rank 2 says where it
    was."""
    rollout, trainer = (
        fault("scorer", 2, "hang", call=3),
        fault("save", 0, "hang", name="later", call=3),
    )
    train = running(*IMPATIENT, "max_rl_steps=9", *rollout, trainer[-1], fork=True)
    assert_failed(train, "rank 0 (trainer) hangs in stage checkpoint (thread ", within=60.0)
    assert "raise limits.stage_floor_s" in train.summary["cause"]
    (lost,) = train.summary["lost"]
    assert "rank 2 (rollout) hangs in stage score judge_a (thread scorer): no progress for" in lost
    assert "faults.py" in (train.run_dir / "logs" / "rank-002.log").read_text(), (
        "the stacks of its threads"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (
            fault("reduce", 1, "hang", call=2),
            "(trainer) hangs in stage optimizer reduce: no progress for",
        ),
        (
            fault("accumulate", 1, "hang", call=2),
            "rank 1 (trainer) hangs in stage train: no progress for",
        ),
        (
            (*fault("evaluate", 1, "hang", call=2), *EVALUATION),
            "rank 1 (trainer) hangs in stage eval: no progress",
        ),
        ((*SLEEPER, *EVALUATION), "(trainer) hangs in stage score judge_a: no progress for"),
        (
            (*SLEEPER, "reward.placement=thread"),
            "hangs in stage score judge_a (thread scorer): no progress for",
        ),
        (
            (*SLEEPER, "reward.placement=process"),
            "hangs in stage score judge_a (thread scorer): no progress for",
        ),
        (
            ("allow_targets=[tests]", "strategy._target_=tests.strategy.faults.NeverReady"),
            "rank 0 (trainer) hangs, as all ranks wait for each other (rank 0: wait "
            "first_fragment, rank 1: wait "
            "first_fragment, rank 2: wait weights, rank 3: wait weights): nobody has been at work "
            "for",
        ),
    ],
)
def test_what_never_returns_is_named(running: Any, words: list[str], cause: str) -> None:
    evaluates = set(EVALUATION) <= set(words)
    tiny = [word for word in TINY if not (evaluates and word == "~callbacks.evaluation")]
    train = running(*IMPATIENT, *words, tiny=tiny, fork=True)
    # A scorer's process starts in its first call; twice that long each rollout is given, in turn.
    in_turn = "reward.placement=process" in words
    assert_failed(train, cause, within=60.0 if in_turn else GONE_WITHIN_S)
    assert "raise limits.stage_" in train.summary["cause"]


@pytest.mark.slow
def test_a_first_scoring_that_never_returns_has_the_start_limit(running: Any) -> None:
    train = running(*IMPATIENT, "limits.start_s=20", *fault("scorer", 2, "hang"), fork=True)
    watch(train)
    assert train.finish() == 0, train.stderr
    (lost,) = train.summary["lost"]
    assert "rank 2 (rollout) hangs in stage score judge_a" in lost
    assert "raise limits.start_s" in lost


@pytest.mark.slow
def test_a_rank_that_becomes_much_slower_is_left_alone(running: Any) -> None:
    """A decode of 12 s after one of 4 s, with a floor of 5 s; and nothing is judged without a
    factor."""
    first, second = (
        fault("decode", 2, "hang", call=2, seconds=4),
        fault("decode", 2, "hang", "later", call=4, seconds=12),
    )
    for words in ((*first, second[-1]), (*second, "limits.stage_factor=null")):
        train = running(*IMPATIENT, *words, "allocation.rollouts=1", fork=True)
        watch(train)
        assert train.finish() == 0, train.stderr
        assert train.summary["lost"] == []
