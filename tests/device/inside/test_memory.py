"""A rank whose device is full says where and what to do, and the run saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from digenrl import accelerator, run
from digenrl.cluster.world import World
from digenrl.rollout.engine import RolloutEngine
from tests.strategy.processes import Cluster, configured, run_cluster

WORDS = ("max_rl_steps=4",)


def fill(left: int) -> list[torch.Tensor]:
    """Return tensors that hold this rank's device but for fewer than `left` bytes."""
    ballast, size, device = [], 1 << 30, accelerator.current_device()
    while size >= left:
        try:
            ballast.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            size //= 2
    return ballast


class FillsInStep(pl.Callback):
    """Fills the device of trainer `rank` at the first micro-batch of the RL step `step`."""

    def __init__(self, rank: int, step: int) -> None:
        self._rank, self._step, self._ballast = rank, step, list[torch.Tensor]()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.current_epoch == self._step and trainer.strategy.world.rank == self._rank:  # type: ignore[attr-defined]
            self._ballast += fill(1 << 14)  # saving needs some


def filled_in(name: str, after: int) -> Callable[[run.Rank, World], None]:
    """Return a function that fills a rollout's device before call `after` of the engine's `name`."""

    def build(rank: run.Rank, world: World) -> None:
        if world.is_trainer:
            return
        calls, ballast, whole = [0], list[torch.Tensor](), getattr(RolloutEngine, name)

        def filling(engine: RolloutEngine, *args: Any) -> Any:
            calls[0] += 1
            if calls[0] == after:
                ballast.extend(fill(512))
            return whole(engine, *args)

        setattr(RolloutEngine, name, filling)

    return build


def full_trainer(tmp_path: Path, trainers: int, rank: int) -> Cluster:
    def build(each: run.Rank, world: World) -> None:
        if world.is_trainer:
            each.trainer.callbacks.append(FillsInStep(rank, 2))  # type: ignore[attr-defined]

    config = configured(*WORDS, "data.prompts_per_batch=2")
    return run_cluster(tmp_path, trainers, 1, config, after_build=build)


def saved(cluster: Cluster) -> list[str]:
    return sorted(path.name for path in cluster.run_dir.glob("checkpoints/step-*"))


@pytest.mark.parametrize(("trainers", "rank"), [(1, 0), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_a_trainer_that_is_full_saves_the_step_before(
    tmp_path: Path, trainers: int, rank: int
) -> None:
    done = full_trainer(tmp_path, trainers, rank)
    assert done.outcome.status == "stopped", done.outcome.cause
    cause = str(done.outcome.cause)
    assert f"rank {rank}, train g" in cause
    assert "use schedule.tsp.batch=1, model.gradient_checkpointing=true" in cause
    assert "strict out of memory" in cause
    assert saved(done) == ["step-000002"]


@pytest.mark.parametrize(
    ("stage", "call"),
    [
        pytest.param("decode", "decode", marks=pytest.mark.slow),
        pytest.param("generate", "take_step", marks=pytest.mark.slow),
    ],
)
def test_a_rollout_that_is_full_says_so_and_the_run_is_saved(
    tmp_path: Path, stage: str, call: str
) -> None:
    """Tasks of RL step 0 are eight, of four denoising steps each."""
    after = 20 if call == "decode" else 80
    built = filled_in(call, after)
    done = run_cluster(tmp_path, 1, 1, configured(*WORDS), after_build=built)
    assert done.outcome.status == "failed"
    losses = [str(row) for row in done.events() if "lost" in str(row.get("kind"))]
    told = str(done.outcome.cause) + "".join(losses)
    assert f"rank 1, {stage} g" in told
    assert "use a smaller sampling.task_size" in told
    assert saved(done) == ["step-000002"]
