"""Peak memory by rank and stage is the device's own counter."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from digenrl import accelerator, run
from digenrl.cluster.timers import BEAT_EVERY_S
from digenrl.cluster.world import World
from tests.strategy.processes import completed, configured, run_cluster

PLANTED = 32 << 20
"""Bytes that trainer 0 holds for a moment of its first micro-batch."""


class Planted(pl.Callback):
    """Holds memory for a moment, and waits for a heartbeat before the last RL step ends."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch == 0:
            torch.empty(PLANTED, dtype=torch.uint8, device=accelerator.current_device())
        elif batch_idx == 0:
            time.sleep(2 * BEAT_EVERY_S)


def build(rank: run.Rank, world: World) -> None:
    if world.is_trainer:
        rank.trainer.callbacks.append(Planted())  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_line_has_the_most_that_each_rank_held_in_each_stage(tmp_path: Path) -> None:
    cluster = run_cluster(tmp_path, 1, 1, configured(), after_build=build)
    completed(cluster)
    rows = [json.loads(line) for line in (cluster.run_dir / "metrics.jsonl").open()]
    peaks = rows[-1]["peak_gib"]
    assert set(peaks) == {"0", "1"}
    assert {"train", "publish"} <= set(peaks["0"])
    assert {"generate", "decode", "adopt"} <= set(peaks["1"])
    planted = PLANTED / 2**30
    assert planted <= peaks["0"]["train"] < 1.5 * planted
    weights = 40_000 / 2**30
    others = {**peaks["1"], "publish": peaks["0"]["publish"]}
    assert all(0 <= gib < planted for gib in others.values()), others
    assert peaks["1"]["generate"] > weights / 2
