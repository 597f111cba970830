"""What the engine keeps about trainers, and what a virtual run leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from digenrl.record.spans import Span
from digenrl.schedule.staleness import Ledger


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


@dataclass(frozen=True)
class Simulated:
    """What a virtual run did."""

    step_ends: tuple[float, ...]
    """Virtual second at which each RL step was published."""
    spans: tuple[Span, ...]
    seconds: Mapping[tuple[str, str, str], float]
    """(pool, stage, cause or "") -> seconds summed over ranks, without the first step where there are more."""
    made: tuple[tuple[int, int, int, int], ...]
    """(step, task, rank, version) of every finished task."""
    trained: tuple[tuple[int, int, tuple[int, ...]], ...]
    """(step, rank, groups) of every trained fragment part."""
    staleness_max: int
    moves: int
    """Tasks that changed rank."""
    ledger: Ledger
    messages: tuple[str, ...]

    @property
    def step_s(self) -> float:
        """Mean seconds per RL step, without the first (which has no predecessor to overlap with)."""
        if len(self.step_ends) == 1:
            return self.step_ends[0]
        return (self.step_ends[-1] - self.step_ends[0]) / (len(self.step_ends) - 1)
