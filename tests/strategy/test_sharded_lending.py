"""Sharded trainers lend between the updates of a batch as replicas do, and change no weights by it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from digenrl import run
from digenrl.cluster.world import World
from digenrl.rollout.engine import Generation
from digenrl.schedule.scheduler import Scheduler
from digenrl.strategy.shared import Fragment
from digenrl.transport.cells import StepBoard
from tests.strategy.processes import (
    FULL,
    Cluster,
    Job,
    completed,
    configured,
    run_series,
    slow_rollouts,
)
from tests.strategy.test_equality import LIGHT

pytestmark = pytest.mark.processes

WORDS = (
    *LIGHT,
    "schedule.gap=1",
    "schedule.tsp.batch=1",
    "data.prompts_per_batch=2",
    "data.group_size=10",
    "sampling.steps=3",
    "algorithm.updates_per_batch=2",
)
"""An update has a single fragment, which fixes the order of sums. A group has five tasks: an odd
number, so that one of two trainers that lend together generates what is thrown away."""
FSDP = "parallel.sharding=fsdp"
HSDP = ("parallel.sharding=hsdp", "parallel.shard_group=2")


def lend_after_an_update(rank: run.Rank, world: World) -> None:
    """Let trainers lend between updates whatever the search says. Rollouts keep the second group
    back until a trainer waits for it: on a slow machine it would be ready before the first
    update."""
    strategy, folder = rank.strategy, rank.strategy.session.run_dir
    slow_rollouts(rank, world, seconds=0.1)
    take_step = strategy.engine.take_step

    def lend_then(board: StepBoard, pending: Sequence[Fragment]) -> int:
        if strategy.state.updates_done == 0:
            return 0
        (folder / f"waiting-{strategy.state.version}").touch()
        return 1

    def take_late_step(generation: Generation) -> Generation:
        marker = folder / f"waiting-{generation.task.step}"
        deadline = time.monotonic() + (1.0 if generation.task.group > 0 else 0.0)
        # No longer: between two denoising steps a rollout sends what it has of the first group.
        while time.monotonic() < deadline and not marker.exists():
            time.sleep(0.01)
        return take_step(generation)

    strategy.on_bubble = lend_then  # type: ignore[method-assign]
    Scheduler.opens = lambda *args: 0  # type: ignore[method-assign, assignment]
    if not world.is_trainer:
        strategy.engine.take_step = take_late_step  # type: ignore[method-assign]


def lent_after_an_update(cluster: Cluster) -> int:
    """Count the tasks that trainers generated between the two updates of a step."""
    updated = [
        (row["rank"], row["step"], row["end"])
        for row in cluster.spans("optimizer")
        if row.get("what") == "reduce"
    ]
    first = {(rank, step): end for rank, step, end in reversed(updated)}
    return sum(
        row["start"] > first[row["rank"], row["step"]]
        for row in cluster.spans("lend")
        if not row.get("discarded") and (row["rank"], row["step"]) in first
    )


@pytest.mark.parametrize(
    ("trainers", "choices"),
    [
        pytest.param(2, {"lora": (FSDP,), "full": (FSDP, *FULL)}, id="fsdp"),
        pytest.param(4, {"lora": HSDP, "full": (*HSDP, *FULL)}, id="hsdp", marks=pytest.mark.slow),
        pytest.param(2, {"lora": (), "full": FULL}, id="ddp", marks=pytest.mark.slow),
    ],
)
def test_lending_between_updates_leaves_every_bit_of_the_weights(
    tmp_path: Path, trainers: int, choices: dict[str, tuple[str, ...]]
) -> None:
    jobs = [
        Job(
            f"{name}-{tag}",
            configured(*WORDS, *words, f"schedule.tag={tag}"),
            lend_after_an_update if tag == "true" else None,
        )
        for name, words in choices.items()
        for tag in ("false", "true")
    ]
    weights, lent = {}, {}
    for job, cluster in run_series(tmp_path, trainers, 1, jobs):
        weights[job.name] = completed(cluster).weights
        lent[job.name] = lent_after_an_update(cluster)
    for name in choices:
        assert lent[f"{name}-false"] == 0
        assert lent[f"{name}-true"] > 0, "nobody lent between the updates"
        plain = weights[f"{name}-false"]
        assert plain
        for parameter, tensor in plain.items():
            assert torch.equal(weights[f"{name}-true"][parameter], tensor), (name, parameter)
