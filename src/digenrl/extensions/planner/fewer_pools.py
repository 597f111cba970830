"""Plans that leave a pool of slow or small GPUs out.

A rank of every GPU takes part in a run. GPUs with little memory make all ranks hold less, and slow
ones make others wait, so that fewer GPUs may be faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from digenrl.extensions.planner.bound import step_bound
from digenrl.extensions.planner.costing import Costing
from digenrl.extensions.planner.outcome import CandidateOutcome
from digenrl.extensions.planner.plan_text import eligible_outcomes
from digenrl.extensions.planner.planner import PlanError, make_plan


@dataclass(frozen=True)
class FewerPools:
    """The fastest run without one pool."""

    pool: str
    """Pool that is left out."""
    count: int
    """GPUs of that pool."""
    best: CandidateOutcome

    @property
    def word(self) -> str:
        """Word of a command line that leaves the pool out, quoted for a shell."""
        return f"'~hardware.pools.{self.pool}'"


def faster_without(
    costing: Costing, step_s: float, steps: int | None, asynchronous: bool
) -> FewerPools | None:
    """Return the fastest plan that leaves one pool out, if its RL step is shorter than `step_s`
    seconds. None: every pool helps.

    Args:
        steps: RL steps of each finalist's simulation, as in `make_plan`.
        asynchronous: whether one-step asynchrony may be chosen.
    """
    found = [
        FewerPools(name, costing.hardware.find_pool(name).count, best)
        for name, fewer in _without_each_pool(costing)
        # No schedule beats the bound, so that most pools need no search.
        if step_bound(fewer) < step_s
        and (best := _fastest(fewer, steps, asynchronous)) is not None
        and best.step_s < step_s
    ]
    return min(found, key=lambda each: each.best.step_s, default=None)


def _without_each_pool(costing: Costing) -> Iterator[tuple[str, Costing]]:
    """Yield each pool that could be left out, and the costing without it."""
    hardware = costing.hardware
    for pool in hardware.pools if len(hardware.pools) > 1 else ():
        rest = tuple(other for other in hardware.pools if other != pool)
        lines = {ends: line for ends, line in hardware.lines.items() if pool.name not in ends}
        if not pool.judges and any(other.role != "rollout" for other in rest):
            yield pool.name, replace(costing, hardware=replace(hardware, pools=rest, lines=lines))


def _fastest(costing: Costing, steps: int | None, asynchronous: bool) -> CandidateOutcome | None:
    """Return the winner of a plan; None where nothing fits."""
    with suppress(PlanError):
        plan = make_plan(costing, steps, asynchronous=asynchronous)
        return next(iter(eligible_outcomes(plan, asynchronous)), None)
    return None
