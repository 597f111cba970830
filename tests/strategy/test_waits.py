"""Every wait is counted under its cause: of replicas for a slower one, of a rollout for a busy
scorer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from digenrl import run
from digenrl.cluster.world import World
from digenrl.rewards.suite import RewardSuite
from tests.strategy.processes import completed, configured, run_cluster
from tests.strategy.test_equality import LIGHT

pytestmark = pytest.mark.processes


def slow_scorer_and_trainer(rank: run.Rank, world: World) -> None:
    """Scoring takes 0.2 s, and trainer 1 takes 0.1 s longer for each micro-batch."""
    score, step = RewardSuite.score, rank.module.training_step

    def slow_score(self: RewardSuite, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.2)
        return score(self, *args, **kwargs)

    def slow_step(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.1)
        return step(*args, **kwargs)

    RewardSuite.score = slow_score  # type: ignore[method-assign]
    if world.rank == 1:
        rank.module.training_step = slow_step  # type: ignore[method-assign]


def test_waits_are_counted_under_their_cause(tmp_path: Path) -> None:
    config = configured(
        *LIGHT, "schedule=sync", "reward.placement=thread", "reward.pending=1", "max_rl_steps=1"
    )
    cluster = run_cluster(tmp_path, 2, 1, config, after_build=slow_scorer_and_trainer)
    completed(cluster)
    waits: dict[tuple[int, str], float] = {}
    for row in cluster.spans("wait"):
        key = row["rank"], row["cause"]
        waits[key] = waits.get(key, 0.0) + row["end"] - row["start"]
    assert waits[0, "straggler"] > 0.1, waits
    assert waits[0, "straggler"] > waits.get((1, "straggler"), 0.0)
    assert waits[2, "reward"] > 0.2, waits
    reduced = [
        row
        for row in cluster.spans("optimizer")
        if row["rank"] == 0 and row.get("what") == "reduce"
    ]
    assert all(row["end"] - row["start"] < waits[0, "straggler"] for row in reduced), (
        "the wait is not the reduction"
    )
