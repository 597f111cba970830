"""What the engine keeps about trainers, and what a virtual run leaves behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from digenrl.record.spans import Span
from digenrl.schedule.staleness import Ledger

TOLERANCE = 0.002
"""Relative difference of two windows that are taken for equal."""
SPREAD = 0.01
"""What one step more or less may change in a window's mean, relatively."""
MOST_STEPS = 30
"""A schedule that has not settled after so many RL steps does not settle."""


@dataclass(eq=False)
class Unit:
    """Trainer ranks that act together."""

    ranks: tuple[int, ...]
    pending: list[tuple[int, ...]] = field(default_factory=list)
    state: str = "idle"
    """idle | train | lend | barrier"""
    since: float = 0.0
    """Start of the present wait."""
    lent: bool = False
    """It generates or has just generated (a switch is due before it trains)."""
    followed: int = 0
    """How many moves of the first unit, in the present update, it has followed."""


@dataclass(frozen=True)
class Led:
    """A move of the trainers that decide for all in lock-step."""

    fragment: tuple[int, ...] | None
    """What they train; None: they generate."""
    begin: float
    micro_batches: tuple[float, ...]
    """Seconds of each."""


@dataclass(frozen=True)
class Simulated:
    """What a virtual run did."""

    step_ends: tuple[float, ...]
    """Virtual second at which each RL step was published."""
    spans: tuple[Span, ...]
    first: int
    """The step whose end begins the window that `step_s` and `seconds` are about; -1: the run's beginning."""
    settled: bool
    """The window is steady: longer simulations give the same seconds per step."""
    seconds: Mapping[tuple[str, str, str], float]
    """(pool, stage, cause or "") -> seconds summed over ranks, in the window."""
    made: tuple[tuple[int, int, int, int], ...]
    """(step, task, rank, version) of every finished task."""
    trained: tuple[tuple[int, int, tuple[int, ...]], ...]
    """(step, rank, groups) of every trained fragment part."""
    staleness_max: int
    ledger: Ledger
    messages: tuple[str, ...]

    @property
    def steps(self) -> int:
        """RL steps of the window."""
        return len(self.step_ends) - 1 - self.first

    @property
    def step_s(self) -> float:
        """Mean seconds per RL step in the window."""
        return (self.step_ends[-1] - (self.step_ends[self.first] if self.first >= 0 else 0.0)) / self.steps


def settled_from(ends: Sequence[float], least: float) -> int | None:
    """The step whose end begins a steady window, or None: one that repeats itself with some period, or at the end one
    whose mean step is that of the equally long one before it; not below `least`, what no endless run can beat (a buffer
    that is still being emptied). Steps that do not repeat must be so many that the mean no longer depends on where it
    begins."""
    width = min(MOST_STEPS // 3, (len(ends) - 1) // 2)
    if width < 1:
        return None
    steps = [after - before for before, after in pairwise(ends[-1 - 2 * width :])]
    mean = sum(steps[width:]) / width
    for period in range(1, width + 1):
        if all(abs(a - b) <= TOLERANCE * mean for a, b in zip(steps, steps[period:], strict=False)):
            window = 2 * width // period * period
            return len(ends) - 1 - window if sum(steps[-window:]) >= (1 - TOLERANCE) * least * window else None
    if abs(mean - sum(steps[:width]) / width) > TOLERANCE * mean or mean < (1 - TOLERANCE) * least:
        return None
    return None if max(steps) - min(steps) > SPREAD * width * mean else len(ends) - 1 - 2 * width
