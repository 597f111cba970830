"""What no schedule can beat: the linear programme of the design.

Minimise T with sum_j x_ij = work_i for every stage i and sum_i x_ij t_ij <= n_j T for every pool j of n_j equal GPUs.
Solved through its dual, maximise sum_i work_i y_i with y_i <= t_ij w_j and sum_j n_j w_j <= 1, whose origin is
feasible: the simplex method in exact fractions, a few pools x five stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

STAGES = ("encode", "generate", "decode", "score", "train")
"""Stages of one RL step; units: prompts, samples, samples, samples, cells."""


@dataclass(frozen=True)
class Bound:
    """The optimum, and what it says a GPU second and a unit of work are worth (the dual solution)."""

    seconds: float
    """T."""
    pool_weights: Mapping[str, float]
    """Pool -> seconds of the step per second of one of its GPUs; sum_j n_j w_j = 1."""
    stage_values: Mapping[str, float]
    """Stage -> seconds of the step per unit; T = sum_i work_i y_i, and y_i <= t_ij w_j."""


def bound_seconds(
    pools: Mapping[str, int],
    work: Mapping[str, float],
    seconds_per_unit: Mapping[str, Mapping[str, float | None]],
) -> float:
    """T of `solve_bound`."""
    return solve_bound(pools, work, seconds_per_unit).seconds


def solve_bound(
    pools: Mapping[str, int],
    work: Mapping[str, float],
    seconds_per_unit: Mapping[str, Mapping[str, float | None]],
) -> Bound:
    """The optimum and its prices.

    Args:
        pools: name -> GPUs.
        work: stage -> units.
        seconds_per_unit: stage -> pool -> seconds; None where the pool cannot do the stage.

    Raises:
        ValueError: a stage with work that no pool can do.
    """
    stages = [stage for stage in work if work[stage] > 0 and any(t != 0.0 for t in seconds_per_unit[stage].values())]
    names = list(pools)
    columns = len(stages) + len(names)
    rows: list[list[Fraction]] = []
    for i, stage in enumerate(stages):
        able = [(j, t) for j, name in enumerate(names) if (t := seconds_per_unit[stage].get(name)) is not None]
        if not able:
            raise ValueError(f"no pool of {', '.join(names)} can do {stage}: add a pool, or a smaller model or task.")
        for j, seconds in able:
            row = [Fraction(0)] * columns
            row[i], row[len(stages) + j] = Fraction(1), -Fraction(seconds)
            rows.append([*row, Fraction(0)])
    rows.append([Fraction(0)] * len(stages) + [Fraction(pools[name]) for name in names] + [Fraction(1)])
    best, x = _maximise([Fraction(work[stage]) for stage in stages] + [Fraction(0)] * len(names), rows)
    weights = {name: float(x[len(stages) + j]) for j, name in enumerate(names)}
    values = {stage: float(x[stages.index(stage)]) if stage in stages else 0.0 for stage in work}
    return Bound(float(best), weights, values)


def _maximise(objective: list[Fraction], rows: list[list[Fraction]]) -> tuple[Fraction, list[Fraction]]:
    """max objective.x and its x, with rows (a | b): a.x <= b, x >= 0, b >= 0; Bland's rule, so it ends."""
    variables, slacks = len(objective), len(rows)
    table = [row[:-1] + [Fraction(int(i == k)) for k in range(slacks)] + row[-1:] for i, row in enumerate(rows)]
    cost = [-value for value in objective] + [Fraction(0)] * (slacks + 1)
    basis = list(range(variables, variables + slacks))
    while True:
        entering = next((c for c in range(variables + slacks) if cost[c] < 0), None)
        if entering is None:
            solution = dict(zip(basis, (row[-1] for row in table), strict=True))
            return cost[-1], [solution.get(i, Fraction(0)) for i in range(variables)]
        ratios = [(row[-1] / row[entering], basis[i], i) for i, row in enumerate(table) if row[entering] > 0]
        if not ratios:
            raise ValueError("the programme is unbounded: a stage takes no time on any pool.")
        _, _, pivot = min(ratios)
        lead = table[pivot][entering]
        table[pivot] = [value / lead for value in table[pivot]]
        for i, row in enumerate(table):
            if i != pivot and row[entering]:
                factor = row[entering]
                table[i] = [value - factor * lead_value for value, lead_value in zip(row, table[pivot], strict=True)]
        factor = cost[entering]
        cost = [value - factor * lead_value for value, lead_value in zip(cost, table[pivot], strict=True)]
        basis[pivot] = entering
