"""A run that a callback ends: after a whole RL step, on every trainer, with a checkpoint and its last
evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, Timer
from safetensors.torch import load_file

from digenrl import config as configuration
from digenrl import run
from digenrl.cluster.world import Session, World
from tests.strategy.processes import TINY, Cluster, completed, configured, run_cluster

pytestmark = pytest.mark.processes
EVALUATED = (
    *(word for word in TINY if word != "~callbacks.evaluation"),
    "callbacks.evaluation.samples_per_prompt=2",
    "callbacks.evaluation.max_prompts=2",
    "callbacks.evaluation.every=100",
    "max_rl_steps=5",
)


SMALLER = (
    "data.prompts_per_batch=2",
    "algorithm.kl_weight=0",
    r"model.lora.targets=[attn\.to_q,proj_out]",
)
"""Half the samples and a small LoRA: these tests are about how a run ends."""


class Stop(pl.Callback):
    """Asks for a stop at the fourth micro-batch of the second RL step, on one trainer."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch == 1 and batch_idx == 3:
            trainer.should_stop = True


def adding(*callbacks: pl.Callback, rank: int | None = None) -> Any:
    """Give `callbacks` to the trainers, or to the trainer `rank` alone."""

    def add(built: run.Rank, world: World) -> None:
        if world.is_trainer and rank in (None, world.rank):
            built.trainer.callbacks.extend(callbacks)  # type: ignore[attr-defined]

    return add


def saved_step(cluster: Cluster) -> str:
    return (cluster.run_dir / "checkpoints/last").resolve().name


@pytest.mark.timeout(180)
def test_a_stop_inside_a_step_is_taken_at_its_end_on_every_trainer(tmp_path: Path) -> None:
    """What is saved is what a run of two steps saves."""
    several = (*SMALLER, "algorithm.updates_per_batch=2", "max_rl_steps=5")
    stopped = run_cluster(
        tmp_path / "a", 2, 1, configured(*several), after_build=adding(Stop(), rank=1)
    )
    completed(stopped)
    whole = run_cluster(tmp_path / "b", 2, 1, configured(*several, "max_rl_steps=2"))
    completed(whole)
    for cluster in (stopped, whole):
        assert [row["rl_step"] for row in cluster.metrics()] == [1, 2]
        assert saved_step(cluster) == "step-000002"
    weights = [
        load_file(cluster.run_dir / "checkpoints/last/policy.safetensors")
        for cluster in (stopped, whole)
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


@pytest.mark.timeout(180)
def test_a_timer_ends_a_run_of_two_trainers_after_a_whole_step(tmp_path: Path) -> None:
    timer = Timer(duration={"milliseconds": 1}, interval="step")  # type: ignore[arg-type]
    config = configured(*SMALLER, "max_rl_steps=5")
    cluster = run_cluster(tmp_path, 2, 1, config, after_build=adding(timer))
    assert len(completed(cluster).gradients) == 1, "the update of the whole step"
    assert [row["rl_step"] for row in cluster.metrics()] == [1]
    assert saved_step(cluster) == "step-000001"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("rollouts", [1, 0], ids=["rollouts evaluate", "trainers evaluate"])
def test_early_stopping_leaves_a_checkpoint_and_the_last_evaluation(
    tmp_path: Path, rollouts: int
) -> None:
    """Early stopping runs after all other callbacks. Neither a checkpoint nor an evaluation was
    due."""
    early = EarlyStopping("reward", stopping_threshold=-1e9, mode="max", strict=True)
    config = configuration.load(EVALUATED).settings
    cluster = run_cluster(tmp_path, 1, rollouts, config, after_build=adding(early))
    completed(cluster)
    kinds = [(row.get("kind"), row["rl_step"]) for row in cluster.metrics()]
    assert kinds == [("eval", 0), ("step", 1), ("eval", 1)]
    assert saved_step(cluster) == "step-000001"
    manifest = json.loads((cluster.run_dir / "checkpoints/last/manifest.json").read_text())
    assert manifest


class Fails(pl.Callback):
    """Raises in the second RL step."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch == 1:
            raise RuntimeError("out of luck")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("end", ["raises", "completes"])
def test_no_process_group_is_destroyed_after_an_exception(tmp_path: Path, end: str) -> None:
    """Peers may be in a collective of the group, and NCCL waits for them."""

    def watched(world: World, session: Session) -> None:
        destroy = dist.destroy_process_group

        def tell() -> None:
            (tmp_path / f"destroyed-{world.rank}").touch()
            destroy()

        dist.destroy_process_group = tell

    fails = adding(Fails(), rank=1) if end == "raises" else None
    config = configured(*SMALLER, "parallel.sharding=fsdp")
    cluster = run_cluster(tmp_path, 2, 0, config, before=watched, after_build=fails)
    destroyed = sorted(path.name for path in tmp_path.glob("destroyed-*"))
    if end == "completes":
        completed(cluster)
        assert destroyed == ["destroyed-0", "destroyed-1"]
    else:
        assert "rank 1 (trainer) raised RuntimeError: out of luck" in str(cluster.outcome.cause)
        assert destroyed == []


@pytest.mark.timeout(180)
def test_callbacks_that_need_a_logger_work_with_several_trainers(tmp_path: Path) -> None:
    """Trainer 0 alone has the run's loggers."""
    words = [word for word in TINY if word != "logger=none"]
    lightning = "{_target_:lightning.pytorch.callbacks."
    watchers = [
        "logger=csv",
        "allow_targets=[lightning.pytorch.callbacks]",
        f"+callbacks.rates={lightning}LearningRateMonitor}}",
        f"+callbacks.device={lightning}DeviceStatsMonitor,cpu_stats:true}}",
    ]
    config = configuration.load([*words, *SMALLER, *watchers]).settings
    cluster = run_cluster(tmp_path, 2, 0, config)
    completed(cluster)
    (header, *rows) = (cluster.run_dir / "csv/metrics.csv").read_text().splitlines()
    assert "lr-Adam" in header
    assert "cpu_percent" in header
    assert rows
