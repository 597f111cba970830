"""A candidate, simulated: how long its step takes, and what separates it from the bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from digenrl.recompute import Recompute
from digenrl.simulate.bound import Bound
from digenrl.simulate.candidate import Candidate, Costing
from digenrl.simulate.records import MOST_STEPS, Simulated
from digenrl.simulate.virtual_cluster import waves
from digenrl.simulate.virtual_run import steady

WAVES = 8
"""Ranks that a quick simulation keeps at least."""
QUICK_STEPS = 9
"""RL steps that it takes at most."""
_EXCESS = {
    "encode": "repeated encoding",
    "generate": "generation: batch size, placement",
    "decode": "decode: placement",
    "score": "score: placement",
    "train": "training: batch size, placement, uneven micro-batches",
}
"""Stage -> what its seconds beyond the bound's are called."""


@dataclass(frozen=True)
class Outcome:
    """A candidate, simulated."""

    costing: Costing
    candidate: Candidate
    result: Simulated
    bound: Bound

    @property
    def step_s(self) -> float:
        return self.result.step_s

    @property
    def bound_s(self) -> float:
        return self.bound.seconds

    @property
    def efficiency(self) -> float:
        return self.bound_s / self.step_s

    @property
    def _steps(self) -> int:
        return self.result.steps

    @property
    def bubble(self) -> dict[str, float]:
        """Cause -> share of all GPU time spent waiting."""
        total = self.step_s * self.costing.hardware.gpus * self._steps
        table: dict[str, float] = {}
        for (_, stage, cause), seconds in self.result.seconds.items():
            if stage == "wait":
                table[cause] = table.get(cause, 0.0) + seconds / total
        return table

    @cached_property
    def _spent(self) -> Mapping[str, float]:
        """Stage, or "wait: cause" -> seconds per step, each GPU's weighted with what the bound says they are worth."""
        table: dict[str, float] = {}
        for (pool, stage, cause), seconds in self.result.seconds.items():
            name = f"wait: {cause}" if stage == "wait" else "generate" if stage == "lend" else stage
            table[name] = table.get(name, 0.0) + self.bound.pool_weights[pool] * seconds / self._steps
        return table

    def limits(self) -> list[dict[str, Any]]:
        """What separates the step from the bound: (cause, seconds per step), the largest first; they sum to the gap.

        The weighted seconds of all GPUs are the step; the bound is the work at its values. What a stage takes beyond
        its value is its excess: of training, what is repeated and what communication adds are named apart.
        """
        limits = {name: s for name, s in self._spent.items() if name not in _EXCESS}
        busy = dict.fromkeys(self.bound.pool_weights, 0)
        for name, _ in self.costing.placed(self.candidate):
            busy[name] += 1
        unused = ((p.count - busy[p.name]) * self.bound.pool_weights[p.name] for p in self.costing.hardware.pools)
        limits["idle GPUs"] = self.step_s * sum(unused)
        for stage, units in self.costing.work_units().items():
            limits[_EXCESS[stage]] = self._spent.get(stage, 0.0) - units * self.bound.stage_values[stage]
        for cause, seconds in self._training().items():
            limits[cause] = seconds
            limits[_EXCESS["train"]] -= seconds
        limits["switches, work of other steps"] = self.step_s - self.bound_s - sum(limits.values())
        ordered = sorted(limits.items(), key=lambda item: -abs(item[1]))
        return [{"cause": cause, "seconds": seconds} for cause, seconds in ordered if abs(seconds) > 1e-9]

    def _training(self) -> dict[str, float]:
        """Recomputation and communication inside the trainers' spans."""
        costing, candidate = self.costing, self.candidate
        cluster, spec = costing.cluster(candidate), costing.spec(candidate)
        table = {"recomputation": 0.0, "communication": 0.0}
        for rank in {rank.pool: rank for rank in cluster.trainers}.values():
            pool = costing.hardware.pool(rank.pool)
            spent = self.result.seconds.get((rank.pool, "train", ""), 0.0)
            spent *= self.bound.pool_weights[rank.pool] / self._steps
            plain = costing.costs.cell_seconds(pool, candidate.spec.task_size, candidate.spec.tsp_batch, Recompute())
            block = rank.cell_seconds * spec.tsp_batch + cluster.micro_batch_seconds
            table["recomputation"] += spent * (rank.cell_seconds - plain) * spec.tsp_batch / block
            table["communication"] += spent * cluster.micro_batch_seconds / block
        return table


def evaluate(
    costing: Costing,
    candidate: Candidate,
    bound: Bound,
    exact: bool = False,
    trace: bool = False,
    steps: int | None = None,
) -> Outcome:
    """Simulate `candidate` until its step no longer changes (or `steps` RL steps). Quick: what equal ranks do at once is
    one event; exact: every rank by itself."""
    spec, cluster = costing.spec(candidate), costing.cluster(candidate)
    if not exact:
        spec, cluster = waves(spec, cluster, WAVES)
    return Outcome(costing, candidate, steady(spec, cluster, steps, MOST_STEPS if exact else QUICK_STEPS, trace=trace), bound)
