"""`hardware.emulate=true`: how long every rank sleeps, from the cost model of the profile that the planner uses."""

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
    "rewards": {"jpeg_size": {"scorer": {"_target_": "reward_models.jpeg_size.JpegSize"}, "weight": 1.0}},
}
"""A real scorer that costs next to nothing; the profile's scoring time is part of the emulated decode."""


@dataclass(frozen=True)
class Durations:
    """Seconds on one rank. A task is b samples."""

    task_size: int
    """b."""
    encode: float
    """One prompt, once."""
    step: float
    """One denoising step of a task."""
    decode: float
    """Decode (and scoring on the GPU) of a task."""
    cell: float
    """Forward and backward of one trained step of a task."""
    fetch: float = 0.0
    """What a version takes to this rank's place, over a line of `hardware.links`."""
    send: float = 0.0
    """What a task takes from there, when all ranks of its pool send at once."""

    def scaled(self, factor: float) -> Durations:
        """All durations times `hardware.time_scale`."""
        names = ("encode", "step", "decode", "cell", "fetch", "send")
        return replace(self, **{name: getattr(self, name) * factor for name in names})


def stand_ins(composed: Composed, trainers: int, rollouts: int) -> tuple[StandIn, ...]:
    """Return what each rank builds when the run is emulated; () where the networks are real.

    Raises:
        ValueError: as `durations`.
    """
    adapter = composed.config.model.get("lora") is not None
    return tuple(
        StandIn(
            {"_target_": _POLICY, "durations": {"_target_": _DURATIONS, **asdict(own)}, "adapter": adapter},
            _REWARD,
            {"_target_": _LINE, "fetch": own.fetch, "send": own.send},
        )
        for own in durations(composed, trainers, rollouts)
    )


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
