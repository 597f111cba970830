"""Make the record of trajectories of a run, and the source of fragments of a replayed run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from digenrl.cluster.world import Session, World
from digenrl.extensions.records.replay import RecordedSource, Recording, step_bytes
from digenrl.extensions.records.trajectories import Recorded, TrajectoryFiles
from digenrl.record.run_dir import TRAJECTORIES, append_event, free_space
from digenrl.schedule import group_tasks
from digenrl.strategy.setup import RankSetup


def recording(config: DictConfig, world: World, session: Session) -> Recording | None:
    """Return the recording of a trainer's messages; None on a rollout. Trainers share the allowed
    bytes equally."""
    if not world.is_trainer:
        return None
    room = config.record.trajectories_mib * 2**20 / world.trainers
    return Recording(TrajectoryFiles(session.run_dir, world.rank, room))


def source(run: str) -> Any:
    """Return the maker of a fragment source that replays the run in directory `run`."""
    return partial(RecordedSource, Recorded(Path(run)))


def check(config: DictConfig, means: bool, final: bool) -> None:
    """Refuse to replay a run whose record lacks data that this run trains on.

    Args:
        means, final: whether the algorithm needs the rollout's transition means, and the clean
            latents.

    Raises:
        TrajectoryError: steps, rewards, means or clean latents are missing.
    """
    weighted = [name for name, entry in config.reward.rewards.items() if entry.get("weight", 1.0)]
    Recorded(Path(config.replay)).require(config.max_rl_steps, means, final, weighted)


def announce(config: DictConfig, setup: RankSetup, base: bool) -> None:
    """Tell the user before the first step how large the record will be.

    Args:
        base: whether the base model's transition means are recorded too.
    """
    spec, engine, run_dir = setup.spec, setup.engine, setup.session.run_dir
    outline = engine.outline(group_tasks(spec, 0, 0)[0], setup.sampler.batch(0)[0])
    means = torch.empty(engine.policy.drawn_shape, device="meta") if base else None
    step = step_bytes(spec, setup.world.trainers, setup.lockstep, outline, means) / 2**20
    steps, limit = config.max_rl_steps, config.record.trajectories_mib
    said = f"{step:.3g} MiB an RL step, {step * steps:.4g} MiB for {steps}, {free_space(run_dir)}"
    if step * steps > limit:
        said += f"; record.trajectories_mib={limit:g} holds {int(limit // step)}"
    append_event(run_dir, TRAJECTORIES, {"cause": said})
