"""`hardware.emulate=true`: how long every rank sleeps, from the cost model of the profile that the planner uses, and
the same cluster as the simulator sees it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from digenrl.config import Composed
from digenrl.models.emulated import Durations
from digenrl.preflight import candidate_of, costing_of
from digenrl.simulate.candidate import Candidate, Costing
from digenrl.simulate.virtual_cluster import Cluster

REWARD: dict[str, Any] = {
    "_target_": "digenrl.rewards.suite.RewardSuite",
    "_recursive_": False,
    "placement": "inline",
    "rewards": {"jpeg_size": {"scorer": {"_target_": "reward_models.jpeg_size.JpegSize"}, "weight": 1.0}},
}
"""A real scorer that costs next to nothing; the profile's scoring time is part of the emulated decode."""


def durations(composed: Composed, trainers: int, rollouts: int) -> tuple[Durations, ...]:
    """How long every rank's network sleeps; () where the networks are real.

    Raises:
        ValueError: the experiment's model has no counted sizes, or the pools do not hold that many ranks.
    """
    config: Any = composed.config
    if not config.hardware.emulate:
        return ()
    costing = costing_of(composed)
    candidate = candidate_of(config, trainers, rollouts, costing.work.trained_steps)
    return tuple(
        Durations(
            task_size=candidate.spec.task_size,
            encode=rank.encode_seconds,
            step=rank.step_seconds,
            decode=rank.decode_seconds + rank.score_seconds,
            cell=rank.cell_seconds,
        ).scaled(config.hardware.time_scale)
        for rank in costing.cluster(candidate).ranks
    )


@dataclass(frozen=True)
class Overheads:
    """Real seconds that a machine adds to an emulated rank's sleeps (`benchmarks/overhead.py` measures them)."""

    task: float = 0.0
    """Of a task beside its denoising steps: claim, conditioning, decode, scoring."""
    step: float = 0.0
    """Of one denoising step."""
    micro_batch: float = 0.0
    """Of one micro-batch: Lightning's loop, loss, backward."""
    update: float = 0.0
    """Gradient reduction and optimizer step."""
    publish: float = 0.0
    """Copy and digest of the published weights, before the trainers go on."""
    weights: float = 0.0
    """From there until a rollout rank has adopted them."""
    deliver: float = 0.0
    """A finished task on its way to the trainers."""
    move: float = 0.0
    """A suspended task on its way to another rank."""


def emulated_cluster(costing: Costing, candidate: Candidate, time_scale: float, overheads: Overheads) -> Cluster:
    """What the simulator must be given to predict an emulated run: scaled sleeps, and this machine's own seconds in
    place of the profile's links and optimizer."""
    cluster = costing.cluster(candidate)
    ranks = tuple(
        replace(
            rank,
            step_seconds=rank.step_seconds * time_scale + overheads.step,
            encode_seconds=rank.encode_seconds * time_scale,
            decode_seconds=rank.decode_seconds * time_scale,
            score_seconds=rank.score_seconds * time_scale + overheads.task,
            cell_seconds=rank.cell_seconds * time_scale,
            adopt_seconds=0.0,
        )
        for rank in cluster.ranks
    )
    return replace(
        cluster,
        ranks=ranks,
        micro_batch_seconds=overheads.micro_batch,
        reduce_seconds=overheads.update,
        optimizer_seconds=0.0,
        snapshot_seconds=overheads.publish,
        publish_seconds=overheads.weights,
        deliver_seconds=overheads.deliver,
        move_seconds=overheads.move,
        switch_seconds=0.0,
    )
