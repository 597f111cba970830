"""Each mechanism of the schedule is seen to happen. Results agree whether it does or not, so only
the record of a run can tell: who generated, when training began, and how many cells a forward
held."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from digenrl import run
from digenrl.cluster.world import World
from tests.shared import made_once
from tests.strategy.processes import (
    Cluster,
    Job,
    completed,
    configured,
    run_series,
    slow_rollouts,
)
from tests.strategy.test_equality import LIGHT

pytestmark = pytest.mark.processes

SYNC = "schedule=sync"
MODES = {
    "sync": (SYNC,),
    "gap": (SYNC, "schedule.gap=1"),
    "tsp": (SYNC, "schedule.tsp.batch=all"),
    "shard": (SYNC, "schedule.tsp.shard=true"),
    "tag": (SYNC, "schedule.gap=1", "schedule.tag=true"),
    "async": (SYNC, "schedule.gap=1", "schedule.async_steps=1", "schedule.stale_fraction=0.5"),
}


def watched(rank: run.Rank, world: World) -> None:
    """Slow rollouts; each trained forward notes its rows."""
    slow_rollouts(rank, world)
    velocity = rank.strategy.engine.policy.velocity
    path = rank.strategy.session.run_dir / f"forwards-{world.rank}.jsonl"

    def noted(latents: torch.Tensor, *args: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            with path.open("a") as file:
                print(json.dumps(len(latents)), file=file)
        return velocity(latents, *args)

    if world.is_trainer:
        rank.strategy.engine.policy.velocity = noted  # type: ignore[method-assign]


class Seen:
    """What a run's record tells about its mechanisms."""

    def __init__(self, cluster: Cluster) -> None:
        completed(cluster)
        made = [*cluster.spans("generate"), *cluster.spans("lend")]
        trained = cluster.spans("train")
        steps = sorted({row["step"] for row in trained})
        self.generated_by = {row["rank"] for row in made}
        self.trained_by = {row["rank"] for row in trained}
        self.lent = Counter(row["rank"] for row in cluster.spans("lend"))
        """Rank of a trainer -> tasks that the rank generated."""
        self.early = [
            min(row["start"] for row in trained if row["step"] == step)
            < max(row["end"] for row in made if row["step"] == step)
            for step in steps
        ]
        """Whether training began before the last sample was there, by RL step."""
        self.ahead = {row["step"] - row["version"] for row in made if row["step"] <= max(steps)}
        """Versions by which the samples lag."""
        self.overlap = any(
            row["start"] < max(each["end"] for each in trained if each["step"] == row["step"] - 1)
            for row in made
            if row["step"] > 0
        )
        """Whether samples of a step were made before the step before was trained."""
        self.staleness = max(
            row["staleness_max"] for row in cluster.metrics() if "staleness_max" in row
        )
        self.rows = Counter(
            json.loads(line)
            for path in cluster.run_dir.glob("forwards-*.jsonl")
            for line in path.read_text().splitlines()
        )
        """Rows of a trained forward -> forwards."""
        ranks_of: dict[tuple[int, int, int], set[int]] = {}
        for (step, prompt, sample, _), ranks in cluster.record.trained_by.items():
            ranks_of.setdefault((step, prompt, sample), set()).update(ranks)
        self.shared = {len(ranks) for ranks in ranks_of.values()}
        """Numbers of trainers that share the time steps of one sample."""


def runs(folder: Path) -> dict[str, Seen]:
    """Name of a mode -> what its run has shown."""
    jobs = [Job(name, configured(*LIGHT, *words), watched) for name, words in MODES.items()]
    return {job.name: Seen(cluster) for job, cluster in run_series(folder, 2, 1, jobs)}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, shared_folder: Path) -> dict[str, Seen]:
    """What `runs` returns: half a minute."""
    return made_once(shared_folder, "witnesses", lambda: runs(tmp_path_factory.mktemp("witnesses")))


def test_without_lending_rollouts_alone_generate(seen: dict[str, Seen]) -> None:
    assert seen["sync"].generated_by == {2}
    assert seen["sync"].trained_by == {0, 1}


def test_gap_trains_groups_before_the_last_is_made(seen: dict[str, Seen]) -> None:
    assert seen["gap"].early == [True, True]
    assert seen["sync"].early == [False, False]


def test_tsp_puts_the_steps_of_a_task_into_one_forward(seen: dict[str, Seen]) -> None:
    (single,), (wide,) = seen["sync"].rows, seen["tsp"].rows
    assert wide % single == 0
    assert wide > single
    cells = {name: sum(r * n for r, n in seen[name].rows.items()) for name in ("sync", "tsp")}
    assert cells["sync"] == cells["tsp"]


def test_tsp_shard_divides_the_steps_of_a_sample_over_the_trainers(seen: dict[str, Seen]) -> None:
    assert seen["shard"].shared == {2}
    assert seen["sync"].shared == {1}


def test_tag_lets_trainers_generate(seen: dict[str, Seen]) -> None:
    assert seen["tag"].lent
    assert set(seen["tag"].lent) <= {0, 1}, "only trainers lend"
    assert not any(seen[name].lent for name in MODES if name != "tag")


def test_asynchrony_overlaps_steps_and_lags_by_one_version(seen: dict[str, Seen]) -> None:
    assert seen["async"].overlap
    assert seen["async"].ahead == {0, 1}
    assert seen["async"].staleness == 1
    for name in MODES:
        if name != "async":
            assert not seen[name].overlap, name
            assert (seen[name].ahead, seen[name].staleness) == ({0}, 0), name
