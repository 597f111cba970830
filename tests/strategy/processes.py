"""A real small cluster for tests: the launcher, forked ranks, store and sockets, on the digits
experiment made tiny.

`run_cluster` records what the trainers trained (every cell of every micro-batch), the accumulated
gradient before each optimizer step, and the final weights. `tests.strategy.reference` computes the
same without any strategy code.
"""

from __future__ import annotations

import gc
import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

import digenrl.extensions.tasks.digits  # noqa: F401  (diffusers loads once, here, and not in every forked rank)
from digenrl import config as configuration
from digenrl import run
from digenrl.cluster.control import Control
from digenrl.cluster.launcher import Launch, RunOutcome, launch_ranks
from digenrl.cluster.limits import Limits
from digenrl.cluster.store import StoreClient, StoreServer
from digenrl.cluster.world import Session, World
from digenrl.config.settings import Settings
from digenrl.rollout.engine import Generation
from digenrl.strategy.checkpoint_io import newest_valid
from digenrl.types import TrainBatch

TINY = (
    "experiment=digits_flowgrpo",
    "callbacks=default",
    "~callbacks.evaluation",
    "callbacks.checkpoint.every=1000",
    "logger=none",
    "schedule=sync",
    "data.prompts_per_batch=4",
    "data.group_size=4",
    "sampling.task_size=2",
    "sampling.steps=4",
    "sampling.eval.steps=4",
    "model.lora.rank=4",
    "model.lora.alpha=8",
    "algorithm.updates_per_batch=1",
    "algorithm.max_grad_norm=null",
    "max_rl_steps=2",
    "allocation.max_restarts=0",
    "allocation.patience_s=0",
)
"""4 prompts x 4 samples, tasks of 2, 4 denoising steps (3 trained), LoRA of rank 4, no
evaluation."""
SMALL = (
    "hardware=cpu_tiny",  # by digenrl.models.tiny
    "~callbacks.evaluation",
    "logger=none",
    "reward=video_quality",
    "max_rl_steps=1",
)
FEW = (
    "sampling.steps=3",
    "data.prompts_per_batch=1",
    "algorithm.updates_per_batch=1",
    "schedule.skip_zero=false",
)
SGD = (
    "algorithm.optimizer._target_=torch.optim.SGD",
    "~algorithm.optimizer.betas",
    "~algorithm.optimizer.eps",
    "algorithm.optimizer.lr=0.02",
    "algorithm.optimizer.weight_decay=0",
)
"""Updates are linear in the gradient: rounding is not amplified from one RL step to the next."""
FP64 = ("model.dtype=float64", "sampling.storage_dtype=float64")
FULL = ("model.lora=null", "algorithm.kl_weight=0")

Key = tuple[int, int, int, int]
"""(RL step, group, sample, denoising step)."""


@dataclass(frozen=True)
class Cell:
    """What was trained at one (sample, denoising step)."""

    version: int
    latents: Tensor
    next_latents: Tensor
    log_prob: Tensor
    reward: Tensor


@dataclass
class Record:
    """What a run did."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Accumulated gradient before each optimizer step (before clipping), by parameter name."""
    cells: dict[Key, Cell] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    trained_by: dict[Key, list[int]] = field(default_factory=dict)
    """Trainer ranks that trained each cell with weight 1; exactly one each (I2)."""
    micro_batches: dict[int, int] = field(default_factory=dict)
    """Trainer rank -> micro-batches it ran."""
    padded: dict[int, int] = field(default_factory=dict)
    """Trainer rank -> cells of weight 0 that it computed."""


def configured(*overrides: str) -> Settings:
    """The tiny configuration with `overrides` applied."""
    words = [*TINY, *overrides]
    if "model.lora=null" in overrides:
        words = [word for word in words if not word.startswith("model.lora.")]
    return configuration.load(words).settings


class Probe(pl.Callback):
    """Writes what this trainer rank trained, and on rank 0 gradients and final weights, as
    safetensors files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tensors: dict[str, Tensor] = {}
        self._updates = 0
        self._batches = self._padded = 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: TrainBatch, batch_idx: int
    ) -> None:
        self._batches += 1
        for block in batch.blocks:
            if block.weight == 0.0:
                self._padded += block.samples * len(block.steps)
                continue
            # [rewards, P, G]; a single reward is a scalar of each sample
            rewards = torch.stack([batch.rewards[name] for name in sorted(batch.reward_weights)])
            for row in range(block.samples):
                sample = block.numbers[row]
                for k, denoise_step in enumerate(block.steps.tolist()):
                    key = f"{block.step}/{block.group}/{sample}/{denoise_step}"
                    assert f"{key}/latents" not in self._tensors, (
                        f"cell {key} was trained twice on one rank (I2)"
                    )
                    self._tensors |= {
                        f"{key}/version": torch.tensor(block.version),
                        f"{key}/latents": block.latents[row, k].clone(),
                        f"{key}/next_latents": block.next_latents[row, k].clone(),
                        f"{key}/log_prob": block.log_probs[row, k].clone(),
                        f"{key}/reward": rewards[:, block.group, sample].squeeze(0).clone(),
                    }

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        parameters = pl_module.policy.adapter.trained_parameters()  # type: ignore[union-attr, operator]
        grads = {name: whole(p.grad) for name, p in parameters.items() if p.grad is not None}
        if trainer.is_global_zero:
            save_file(grads, self._directory / f"gradient-{self._updates:04d}.safetensors")
        self._updates += 1

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        parameters = pl_module.policy.adapter.trained_parameters()  # type: ignore[union-attr, operator]
        weights = {name: whole(p) for name, p in parameters.items()}
        if trainer.is_global_zero:
            save_file(weights, self._directory / "weights.safetensors")
        rank = trainer.strategy.world.rank  # type: ignore[attr-defined]
        save_file(self._tensors, self._directory / f"cells-{rank}.safetensors")
        (self._directory / f"batches-{rank}.json").write_text(
            json.dumps([self._batches, self._padded])
        )


def whole(tensor: Tensor) -> Tensor:
    """A contiguous CPU copy of a (sharded) tensor; a collective when it is sharded."""
    tensor = tensor.detach()
    return (
        (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone().contiguous()
    )


@dataclass(frozen=True)
class Cluster:
    """How a cluster run ended, and what it did."""

    outcome: RunOutcome
    record: Record
    run_dir: Path

    def events(self) -> list[dict[str, Any]]:
        """Rows of events.jsonl."""
        return _rows(self.run_dir / "events.jsonl")

    def metrics(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl: one per RL step."""
        return _rows(self.run_dir / "metrics.jsonl")

    def spans(self, stage: str | None = None) -> list[dict[str, Any]]:
        """Return the spans of all ranks, or only those of `stage`."""
        rows = [
            row for path in sorted((self.run_dir / "spans").glob("*.jsonl")) for row in _rows(path)
        ]
        return [row for row in rows if stage is None or row["stage"] == stage]


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


Callbacks = Callable[[World], Sequence[pl.Callback]]


def run_cluster(
    run_dir: Path,
    trainers: int,
    rollouts: int,
    config: Settings,
    resume: bool = False,
    before: Callable[[World, Session], None] | None = None,
    after_build: Callable[[run.Rank, World], None] | None = None,
) -> Cluster:
    """Run a cluster to its end in forked ranks, and read what it recorded.

    Args:
        run_dir: a directory of the test's own.
        resume: continue from the newest valid checkpoint in `run_dir`.
        before: runs in each rank before anything is built (fault injection).
        after_build: runs in each rank between assembly and fit.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    probes = run_dir / "probe"
    probes.mkdir(exist_ok=True)
    for old in probes.iterdir():
        old.unlink()
    checkpoint = newest_valid(run_dir / "checkpoints") if resume else None

    def rank_main(world: World, session: Session) -> None:
        if before is not None:
            before(world, session)
        rank = run.build_rank(config, world, session, callbacks=[Probe(probes)])
        if after_build is not None:
            after_build(rank, world)
        rank.fit(checkpoint)

    patience = float(config.allocation.patience_s)
    outcome = launch_ranks(Launch(trainers, rollouts, rank_main, run_dir, patience_s=patience))
    return Cluster(outcome, read_record(probes), run_dir)


def slow_rollouts(rank: run.Rank, world: World, seconds: float = 0.06) -> None:
    """Each denoising step of a rollout rank takes so many seconds longer; a trainer's takes 5 ms
    longer."""
    advance = rank.strategy.engine.take_step

    def slower(generation: Generation) -> Generation:
        time.sleep(0.005 if world.is_trainer else seconds)
        return advance(generation)

    rank.strategy.engine.take_step = slower  # type: ignore[method-assign]


@dataclass(frozen=True)
class Job:
    """One run of a series."""

    name: str
    config: Settings
    after_build: Callable[[run.Rank, World], None] | None = None
    """Runs in each rank between assembly and fit."""


def run_series(
    run_dir: Path, trainers: int, rollouts: int, jobs: Sequence[Job]
) -> Iterator[tuple[Job, Cluster]]:
    """Run one job after another in the same forked ranks: only the first pays for their start.

    Strategy, process groups, model and store are each job's own. A job that fails ends its ranks,
    and the rest of the jobs get new ones. A job's files are removed as soon as the caller asks for
    the next one.
    """
    left = list(jobs)
    while left:
        outcome = launch_ranks(
            Launch(trainers, rollouts, partial(_work, tuple(left), run_dir), run_dir)
        )
        failed = False
        while left and not failed:
            job = left.pop(0)
            directory = run_dir / job.name
            failed = len(list(directory.glob("finished-*"))) < trainers + rollouts
            yield (
                job,
                Cluster(
                    outcome if failed else RunOutcome(), read_record(directory / "probe"), directory
                ),
            )
            shutil.rmtree(directory, ignore_errors=True)


def _work(jobs: Sequence[Job], run_dir: Path, world: World, session: Session) -> None:
    """The life of one rank of a series."""
    common = Control(StoreClient(*session.store), world.rank)
    for job in jobs:
        directory = run_dir / job.name
        (directory / "probe").mkdir(parents=True, exist_ok=True)
        if world.rank == 0:
            server = StoreServer(socket.create_server((session.host, 0)), session.handshake)
            common.set(f"store/{job.name}", str(server.port))
        port = int(common.wait_for(f"store/{job.name}", "the job's store"))
        own = replace(session, store_port=port, run_dir=directory, limits=Limits(start_s=300.0))
        rank = run.build_rank(job.config, world, own, callbacks=[Probe(directory / "probe")])
        if job.after_build is not None:
            job.after_build(rank, world)
        rank.fit()
        (directory / f"finished-{world.rank}").touch()
        del rank
        gc.collect()
    common.set(f"worked/{world.rank}", "1")
    if world.rank == 0:  # the others still talk to the last job's store
        for other in range(world.size):
            common.wait_for(f"worked/{other}", f"rank {other} to end its last job")


def completed(cluster: Cluster) -> Record:
    """The record of a run that must have completed."""
    assert cluster.outcome.status == "completed", (
        f"{cluster.outcome.cause}\n{logs(cluster.run_dir)}"
    )
    return cluster.record


def logs(run_dir: Path) -> str:
    """The last lines of every rank's log."""
    files = sorted((run_dir / "logs").glob("*")) or sorted((run_dir.parent / "logs").glob("*"))
    return "\n".join(
        f"== {file.name}\n" + "\n".join(file.read_text().splitlines()[-25:]) for file in files
    )


def read_record(probes: Path) -> Record:
    """Merge what the trainer ranks wrote."""
    record = Record()
    record.gradients = [load_file(path) for path in sorted(probes.glob("gradient-*.safetensors"))]
    if (probes / "weights.safetensors").exists():
        record.weights = load_file(probes / "weights.safetensors")
    for path in sorted(probes.glob("cells-*.safetensors")):
        rank = int(path.stem.split("-")[1])
        record.micro_batches[rank], record.padded[rank] = json.loads(
            (probes / f"batches-{rank}.json").read_text()
        )
        tensors = load_file(path)
        for name in {name.rsplit("/", 1)[0] for name in tensors}:
            key = _key(name)
            fields = {
                part: tensors[f"{name}/{part}"]
                for part in ("latents", "next_latents", "log_prob", "reward")
            }
            record.cells[key] = Cell(int(tensors[f"{name}/version"]), **fields)
            record.trained_by.setdefault(key, []).append(rank)
    return record


def _key(name: str) -> Key:
    step, group, sample, denoise_step = (int(part) for part in name.split("/"))
    return step, group, sample, denoise_step


def relative(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """||found - wanted|| / ||wanted|| over all parameters together, in fp64."""
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())[:5]
    difference = (
        sum(float((found[n].double() - wanted[n].double()).square().sum()) for n in wanted) ** 0.5
    )
    size = sum(float(wanted[n].double().square().sum()) for n in wanted) ** 0.5
    assert size > 0, "the reference is zero: a comparison with it shows nothing"
    return difference / size


def assert_same_cells(found: Record, wanted: Record, steps: Sequence[int] | None = None) -> None:
    """Bit-equality of every trained cell (of the RL steps `steps`), and I2: each cell trained by
    exactly one rank."""
    keys = {key for key in wanted.cells if steps is None or key[0] in steps}
    assert {key for key in found.cells if steps is None or key[0] in steps} == keys
    for key in sorted(keys):
        mine, theirs = found.cells[key], wanted.cells[key]
        assert len(found.trained_by[key]) == 1, (
            f"cell {key} was trained by ranks {found.trained_by[key]}"
        )
        assert mine.version == theirs.version, key
        for part in ("latents", "next_latents", "log_prob", "reward"):
            assert torch.equal(getattr(mine, part), getattr(theirs, part)), (
                f"{part} of cell {key} differs"
            )
