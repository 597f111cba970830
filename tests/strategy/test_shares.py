"""schedule.shares=measured: a slow trainer gets fewer cells, and nothing but time changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from digenrl import parts, run
from digenrl.cluster.world import World
from digenrl.hardware import parse_hardware, trainer_speeds
from digenrl.strategy import shares as measured
from digenrl.strategy.checkpoint_io import DirectoryCheckpointIO, newest_valid
from digenrl.types import TrainBatch
from tests.strategy.processes import FP64, Record, completed, configured, relative, run_cluster
from tests.strategy.test_equality import LIGHT, reference_of

pytestmark = pytest.mark.processes

MEASURED = ("schedule.shares=measured", "schedule.tsp.shard=true", "schedule.gap=2")


class Clock:
    """Stands in for the module `time`: a cell takes 20 ms on trainer 0 and 60 ms on trainer 1, on
    any machine."""

    def __init__(self, rank: int) -> None:
        self.seconds_per_cell = (0.02, 0.06)[rank]
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def slow_trainer(rank: run.Rank, world: World) -> None:
    """Trainer 1 needs three times as long for a cell."""
    if not world.is_trainer:
        return
    clock, step = Clock(world.rank), cast(Any, rank.module.training_step)

    def timed(batch: TrainBatch, batch_idx: int) -> Any:
        clock.now += clock.seconds_per_cell * sum(
            block.samples * len(block.steps) for block in batch.blocks
        )
        return step(batch, batch_idx)

    rank.module.training_step = timed  # type: ignore[method-assign]
    measured.time = clock  # type: ignore[assignment]


def by_rank(found: Record, step: int) -> list[int]:
    """Cells of an RL step that each trainer trained."""
    return [
        sum(key[0] == step and ranks == [rank] for key, ranks in found.trained_by.items())
        for rank in (0, 1)
    ]


@pytest.mark.parametrize("async_steps", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_cells_follow_the_measured_speed_and_the_gradient_stays(
    tmp_path: Path, async_steps: int
) -> None:
    config = configured(
        *LIGHT, *FP64, *MEASURED, f"schedule.async_steps={async_steps}", "max_rl_steps=4"
    )
    cluster = run_cluster(tmp_path, 2, 1, config, after_build=slow_trainer)
    found, wanted = completed(cluster), reference_of(config)
    for mine, theirs in zip(found.gradients, wanted.gradients, strict=True):
        # diffusers' RMSNorm takes its variance in fp32: where one rounds the other way, a token of a
        # later version differs by 1e-9. A cell that is lost or doubled differs by 1e-2.
        assert relative(mine, theirs) <= 1e-9
    assert all(len(ranks) == 1 for ranks in found.trained_by.values())
    assert found.trained_by.keys() == wanted.cells.keys()
    assert by_rank(found, 0) == [24, 24], "the profile says equal"
    # A block is one trained step of a task of two samples: 12 blocks of a fragment are split 9 to
    # 3.
    assert by_rank(found, 3) == [36, 12]
    events = [row for row in cluster.events() if row["kind"] == "shares"]
    assert events[0]["shares"] == [1.0, 1.0]
    assert [row["shares"] for row in events[1:]] == [[1.0, 0.33]], "fixed once, then at rest"
    saved = DirectoryCheckpointIO().load_checkpoint(newest_valid(tmp_path / "checkpoints"))
    assert set(saved["digenrl"]["shares"]) == {str(4 + ahead) for ahead in range(async_steps + 1)}


@pytest.mark.slow
def test_a_resumed_run_places_as_the_interrupted_one_would_have(tmp_path: Path) -> None:
    config = configured(*LIGHT, *FP64, *MEASURED, "max_rl_steps=4")

    def stop(rank: run.Rank, world: World) -> None:
        slow_trainer(rank, world)
        rank.trainer.fit_loop.max_epochs = 2

    completed(run_cluster(tmp_path, 2, 1, config, after_build=stop))
    saved = DirectoryCheckpointIO().load_checkpoint(newest_valid(tmp_path / "checkpoints"))
    assert saved["digenrl"]["shares"] == {"2": [1.0, 0.33]}
    found = completed(run_cluster(tmp_path, 2, 1, config, resume=True))
    assert by_rank(found, 2) == [36, 12], (
        "as measured before the stop; this process has measured nothing yet"
    )
    wanted = reference_of(config)
    for mine, theirs in zip(found.gradients, wanted.gradients[2:], strict=True):
        assert relative(mine, theirs) <= 1e-12


def test_the_first_shares_are_the_profile_s() -> None:
    config = configured("hardware=unequal", "schedule.shares=measured")
    pools = config.hardware.pools
    speeds = trainer_speeds(parse_hardware(config.hardware), 20, 4)
    assert set(speeds) == {pool.tflops for pool in pools.values()}
    spec = parts.schedule_spec(config, 3, 20, 4)
    assert spec.measured_shares
    assert set(spec.shares) == {1.0, 0.17}
