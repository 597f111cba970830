"""Graphs that torch.compile makes in a run are counted, step by step and over its ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from digenrl import config as configuration
from digenrl import run
from digenrl.cluster.timers import BEAT_EVERY_S
from digenrl.cluster.world import World
from digenrl.report.read_run import read_run
from digenrl.report.summary import build_summary
from tests.models.tiny_policies import prompt
from tests.strategy.processes import FEW, SMALL, completed, run_cluster


class OtherRows(pl.Callback):
    """Gives the trainer's network five samples at once in the third RL step."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch == 1 and batch_idx == 0:
            time.sleep(2 * BEAT_EVERY_S)  # the rollout tells its graphs of the first step
        if trainer.current_epoch != 2 or batch_idx:
            return
        policy = pl_module.policy
        given = policy.codec.encode([prompt("a star")])
        rows = {key: value.expand(5, *value.shape[1:]) for key, value in given.items()}
        with torch.no_grad():
            policy.velocity(torch.zeros(5, *policy.latent_shape), torch.full((5,), 0.7), rows)


def build(rank: run.Rank, world: World) -> None:
    # Dynamo as it is, and its graphs run as they are: the host's compiler takes minutes.
    torch.compiler.set_stance("default", force_backend="eager")
    if world.is_trainer:
        rank.trainer.callbacks.append(OtherRows())  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.processes
def test_a_steady_run_compiles_in_its_first_step_alone(tmp_path: Path) -> None:
    words = ("experiment=wan21_flowgrpo", *SMALL, *FEW, "model.compile=true", "max_rl_steps=3")
    cluster = run_cluster(tmp_path, 1, 1, configuration.load(words).settings, after_build=build)
    completed(cluster)
    _, steady, changed = (row["graphs"] for row in cluster.metrics())
    assert steady >= 2  # the trainer's and the rollout's
    assert changed > steady
    assert build_summary(read_run(cluster.run_dir))["recompiled"] >= changed - steady
