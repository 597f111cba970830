"""`hardware.emulate=true`: how long every rank sleeps, from the cost model of the profile that the planner uses."""

from __future__ import annotations

from collections import Counter
from typing import Any

from digenrl.config import Composed
from digenrl.extensions.planner.emulated import Durations
from digenrl.preflight import candidate_of, costing_of

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
    ranks = costing.cluster(candidate).ranks
    beside = Counter(rank.pool for rank in ranks if rank.send_seconds)
    return tuple(
        Durations(
            task_size=candidate.spec.task_size,
            encode=rank.encode_seconds,
            step=rank.step_seconds,
            decode=rank.decode_seconds + rank.score_seconds,
            cell=rank.cell_seconds,
            fetch=rank.fetch_seconds,
            send=rank.send_seconds * beside[rank.pool],
        ).scaled(config.hardware.time_scale)
        for rank in ranks
    )
