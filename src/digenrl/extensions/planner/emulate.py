"""Durations of an emulated run (`hardware.emulate=true`): how long every rank sleeps, by the
planner's cost model."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

from digenrl.advisor import StandIn
from digenrl.config import Composed
from digenrl.extensions.planner.reading import candidate_of, costing_of

_POLICY = "digenrl.extensions.planner.emulated.EmulatedPolicy"
_LINE = "digenrl.extensions.planner.emulated.EmulatedLine"
_DURATIONS = "digenrl.extensions.planner.emulate.Durations"
_REWARD: dict[str, Any] = {
    "_target_": "digenrl.rewards.suite.RewardSuite",
    "_recursive_": False,
    "placement": "inline",
    "rewards": {
        "jpeg_size": {"scorer": {"_target_": "reward_models.jpeg_size.JpegSize"}, "weight": 1.0}
    },
}
"""A real scorer that takes almost no time. The profile's scoring time is part of the emulated
decode."""


@dataclass(frozen=True)
class Durations:
    """Seconds of each kind of work on one rank."""

    task_size: int
    """Samples of a task."""
    encode: float
    """Seconds of encoding one prompt, paid once."""
    step: float
    """Seconds of one denoising step of a task."""
    decode: float
    """Seconds of decoding a task and scoring it on the GPU."""
    cell: float
    """Seconds of forward and backward of one trained step of a task."""
    fetch: float
    """Seconds of a version over the line of `hardware.links` to this rank's place."""
    send: float
    """Seconds of a task over the line from this rank's place, when all ranks of its pool send at
    once."""

    def scaled(self, factor: float) -> Durations:
        """Return all durations times `factor` (`hardware.time_scale`)."""
        names = ("encode", "step", "decode", "cell", "fetch", "send")
        return replace(self, **{name: getattr(self, name) * factor for name in names})


def stand_ins(composed: Composed, trainers: int, rollouts: int) -> tuple[StandIn, ...]:
    """Return the stand-ins that each rank of an emulated run builds; () where the networks are
    real.

    Raises:
        ValueError: as `durations`.
    """
    adapter = composed.config.model.get("lora") is not None
    return tuple(
        StandIn(
            {
                "_target_": _POLICY,
                "durations": {"_target_": _DURATIONS, **asdict(own)},
                "adapter": adapter,
            },
            _REWARD,
            {"_target_": _LINE, "fetch": own.fetch, "send": own.send},
        )
        for own in durations(composed, trainers, rollouts)
    )


def durations(composed: Composed, trainers: int, rollouts: int) -> tuple[Durations, ...]:
    """Return how long every rank's network sleeps; () where the networks are real.

    Raises:
        ValueError: the experiment's model has no counted sizes, or the pools do not hold that many
            ranks.
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
