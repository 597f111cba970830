"""How long each rank of an emulated run sleeps, by the planner's cost model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from digenrl.config import Composed
from digenrl.extensions.planner.reading import candidate_of, costing_of


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

    def scaled_by(self, factor: float) -> Durations:
        """Return all durations times `factor` (`hardware.time_scale`)."""
        names = ("encode", "step", "decode", "cell", "fetch", "send")
        return replace(self, **{name: getattr(self, name) * factor for name in names})


def rank_durations(composed: Composed, trainers: int, rollouts: int) -> tuple[Durations, ...]:
    """Return how long every rank's network sleeps; () where the networks are real.

    Raises:
        ValueError: the experiment's model has no counted sizes, or the pools do not hold that many
            ranks.
    """
    settings = composed.settings
    if not settings.hardware.emulate:
        return ()
    costing = costing_of(composed)
    candidate = candidate_of(settings, trainers, rollouts, costing.work.trained_steps)
    ranks = costing.build_cluster(candidate).ranks
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
        ).scaled_by(settings.hardware.time_scale)
        for rank in ranks
    )
