"""`hardware.emulate=true`: how long every rank sleeps, from the cost model of the profile that the planner uses."""

from __future__ import annotations

from typing import Any

from digenrl.cli.plan import workload
from digenrl.config import Composed
from digenrl.models.emulated import Durations
from digenrl.simulate.candidate import Bench, Candidate
from digenrl.simulate.hardware import parse_hardware

REWARD: dict[str, Any] = {
    "_target_": "digenrl.rewards.suite.RewardSuite",
    "_recursive_": False,
    "placement": "inline",
    "rewards": {"jpeg_size": {"scorer": {"_target_": "reward_models.jpeg_size.JpegSize"}, "weight": 1.0}},
}
"""A real scorer that costs next to nothing; the profile's scoring time is part of the emulated decode."""


def durations(composed: Composed, trainers: int, rollouts: int) -> tuple[Durations, ...]:
    """Scaled durations of every launch rank.

    Raises:
        ValueError: the experiment's model has no counted sizes, or the pools do not hold that many ranks.
    """
    config: Any = composed.config
    bench = Bench(workload(composed), parse_hardware(config.hardware))
    batch = config.schedule.tsp.batch
    candidate = Candidate(
        trainers,
        rollouts,
        sharding=config.parallel.sharding,
        task_size=config.sampling.task_size,
        tsp_batch=bench.work.trained_steps if isinstance(batch, str) else min(batch, bench.work.trained_steps),
        checkpointing=bool(config.model.get("gradient_checkpointing", True)),
        static_claims=config.schedule.claims == "split",
    )
    return tuple(
        Durations(
            task_size=candidate.task_size,
            encode=rank.encode_seconds,
            step=rank.step_seconds,
            decode=rank.decode_seconds + rank.score_seconds,
            cell=rank.cell_seconds,
        ).scaled(config.hardware.time_scale)
        for rank in bench.cluster(candidate).ranks
    )
