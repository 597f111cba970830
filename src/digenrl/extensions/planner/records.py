"""State of trainer units in a virtual run, the result of a run, and the test for a steady step
time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypedDict

from digenrl.extensions.planner.virtual_cluster import Cluster
from digenrl.record.spans import Span
from digenrl.schedule.staleness import Ledger

TOLERANCE = 0.002
"""Relative difference below which the step times of two windows count as equal."""
SPREAD = 0.01
"""Largest relative change of a window's mean when the window is one step longer or shorter."""
REPEATED = 8
"""Fewest last steps that must repeat, in at least four periods, where earlier steps do not."""
MOST_STEPS = 30
"""RL steps after which an unsettled schedule counts as never settling."""


class SpanFacts(TypedDict, total=False):
    """Further facts of a virtual span, as `digenrl.record.spans.Span` has them."""

    cause: str
    group: int
    groups: list[int]
    task: int
    version: int
    discarded: bool


class EventQueue:
    """What will happen in a virtual run, in the order of time, and the run's clock."""

    def __init__(self) -> None:
        self.now = 0.0
        """Virtual second of the present event."""
        self._events: list[tuple[float, bool, int, Callable[[], None]]] = []
        """(virtual second, late, number, what happens), a heap."""
        self._number = 0

    def post_event(self, time: float, event: Callable[[], None], late: bool = False) -> None:
        """Let `event` happen at virtual second `time`; `late`: after all others of this moment."""
        self._number += 1
        heapq.heappush(self._events, (time, late, self._number, event))

    def run_next(self) -> bool:
        """Let the next event happen; return whether there was one."""
        if not self._events:
            return False
        self.now, _, _, event = heapq.heappop(self._events)
        event()
        return True


class SpanTable:
    """Spans of a virtual run."""

    def __init__(self, cluster: Cluster) -> None:
        self._ranks = cluster.ranks
        self._rows: list[tuple[int, str, float, float, int, SpanFacts]] = []
        """(rank, stage, start, end, step, facts)."""

    def add_span(
        self, rank: int, stage: str, start: float, end: float, step: int, facts: SpanFacts
    ) -> None:
        """Record a span, unless it is empty."""
        if end > start:
            self._rows.append((rank, stage, start, end, step, facts))

    def seconds_between(self, begin: float, now: float) -> dict[tuple[str, str, str], float]:
        """Return (pool, stage, cause) -> seconds between `begin` and `now`, summed over ranks."""
        table: dict[tuple[str, str, str], float] = {}
        pools = [rank.pool for rank in self._ranks]
        for rank, stage, start, end, _, facts in self._rows:
            if end > begin:
                key = (pools[rank], stage, facts.get("cause", ""))
                table[key] = table.get(key, 0.0) + (min(end, now) - max(start, begin))
        return table

    def all_spans(self) -> tuple[Span, ...]:
        """Return every span."""
        return tuple(
            Span(rank, self._ranks[rank].role, stage, start, end, step, dict(facts))
            for rank, stage, start, end, step, facts in self._rows
        )


@dataclass(eq=False)
class Unit:
    """Trainer ranks that act together, and their state in the present update."""

    ranks: tuple[int, ...]
    pending: list[tuple[int, ...]] = field(default_factory=list)
    state: str = "idle"
    """idle | train | lend | barrier"""
    since: float = 0.0
    """Virtual second at which the present wait began."""
    lent: bool = False
    """Whether the unit generates or has just generated, so that it must switch before it trains."""
    followed: int = 0
    """Number of moves of the first unit that this unit has repeated in the present update."""


@dataclass(frozen=True)
class Led:
    """One move of the first unit, which decides for all units in lock-step."""

    fragment: tuple[int, ...] | None
    """Fragment to train, or None to generate."""
    begin: float
    micro_batches: tuple[float, ...]
    """Seconds of each micro-batch."""


@dataclass(frozen=True)
class Simulated:
    """Result of a virtual run."""

    step_ends: tuple[float, ...]
    """Virtual second at which each RL step was published."""
    spans: tuple[Span, ...]
    first: int
    """Step whose end begins the measured window of `step_s` and `seconds`; -1 = the beginning of
    the run."""
    settled: bool
    """Whether the window is steady, so that a longer simulation would give the same seconds per
    step."""
    seconds: Mapping[tuple[str, str, str], float]
    """(pool, stage, cause or "") -> seconds in the window, summed over ranks."""
    made: tuple[tuple[int, int, int, int], ...]
    """(step, task, rank, version) of every finished task."""
    trained: tuple[tuple[int, int, tuple[int, ...]], ...]
    """(step, rank, groups) of every trained fragment part."""
    staleness_max: int
    ledger: Ledger
    messages: tuple[str, ...]

    @property
    def steps(self) -> int:
        """Number of RL steps in the window."""
        return len(self.step_ends) - 1 - self.first

    @property
    def step_s(self) -> float:
        """Mean seconds per RL step in the window."""
        return (
            self.step_ends[-1] - (self.step_ends[self.first] if self.first >= 0 else 0.0)
        ) / self.steps


def settled_from(ends: Sequence[float], least: float) -> int | None:
    """Return the step whose end begins a steady window, or None.

    A window is steady when its steps repeat with some period: all steps after a first one, or the
    last eight and four periods. A window without a period is steady when both of its halves have
    equal means, and when one step more or less does not matter.

    Args:
        ends: virtual second at which each step ended.
        least: shortest step, in seconds, that a run without an end can reach. A window with a
            shorter mean is still consuming a buffer of samples, so it is not steady.
    """
    width = min(MOST_STEPS // 3, (len(ends) - 1) // 2)
    if width < 1:
        return None
    steps = [after - before for before, after in pairwise(ends[-1 - 2 * width :])]
    mean = sum(steps[width:]) / width
    for period in range(1, width + 1):
        repeated = 0
        for now, before in zip(steps[::-1], steps[-1 - period :: -1], strict=False):
            if abs(now - before) > TOLERANCE * mean:
                break
            repeated += 1
        found = repeated + period
        if found == len(steps) or found >= max(REPEATED, 4 * period):
            window = found // period * period
            long = sum(steps[-window:]) >= (1 - TOLERANCE) * least * window
            return len(ends) - 1 - window if long else None
    if abs(mean - sum(steps[:width]) / width) > TOLERANCE * mean or mean < (1 - TOLERANCE) * least:
        return None
    return None if max(steps) - min(steps) > SPREAD * width * mean else len(ends) - 1 - 2 * width
