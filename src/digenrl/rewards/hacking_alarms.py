"""Alarms that a run writes to its events: rewards that are plausible but wrong, and policies that
exploit them.

No alarm means that nothing was found, not that all is well. The extension `rewards` looks at the
samples of two evaluations (`digenrl.extensions.rewards.picture_alarms`). Two further alarms come
from the eval lines (`digenrl.report.learning_alarms`): a reward that rises while a held-out one
falls, and shrinking variety.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

CANARY_TOLERANCE = 1e-3
"""Tolerated difference, relative to the score or to 1.0 if the score is smaller. Kernels may round
differently."""


@dataclass(frozen=True)
class Alarm:
    """One suspicion."""

    name: str
    """variance_collapse | blur | grid | canary"""
    value: float
    """Measured value."""
    threshold: float
    message: str
    """Cause, and what to look at."""


def canary(name: str, scores: Tensor, expected: Tensor) -> Alarm | None:
    """Return an alarm if pictures no longer get the scores of the run's beginning; both [N], NaN =
    not scored."""
    gaps = (scores - expected).abs().double() / expected.abs().clamp_min(1.0)
    if gaps.isnan().all() or (worst := float(gaps[~gaps.isnan()].max())) <= CANARY_TOLERANCE:
        return None
    row = int(gaps.nan_to_num(-1.0).argmax())
    return Alarm(
        "canary",
        worst,
        CANARY_TOLERANCE,
        f"Reward `{name}` scores a picture {scores[row]:.6g} that it scored {expected[row]:.6g} "
        "when the run began: the reward model changed.",
    )
