"""Shortest RL step that any schedule can reach: the linear programme of the design.

Minimise T with sum_j x_ij = work_i for every stage i and sum_i x_ij t_ij <= n_j T for every pool j
of n_j equal GPUs. HiGHS solves its dual: maximise sum_i work_i y_i with y_i <= t_ij w_j and sum_j
n_j w_j <= 1.
"""

from __future__ import annotations

from collections.abc import Mapping

STAGES = ("encode", "generate", "decode", "score", "train")
"""Stages of one RL step. Their units are prompts, samples, samples, samples and cells."""
_TOLERANCES = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
"""Smallest tolerances that HiGHS accepts."""


def solve_bound(
    pools: Mapping[str, int],
    work: Mapping[str, float],
    seconds_per_unit: Mapping[str, Mapping[str, float | None]],
) -> float:
    """Solve the linear programme and return the seconds of the optimal step (T).

    Args:
        pools: name -> number of GPUs.
        work: stage -> units of work in one RL step.
        seconds_per_unit: stage -> pool -> seconds; None where the pool cannot do the stage.

    Raises:
        ValueError: no pool can do a stage that has work.
    """
    from scipy.optimize import linprog

    names = list(pools)
    able = {
        stage: {name: t for name in names if (t := seconds_per_unit[stage].get(name)) is not None}
        for stage, units in work.items()
        if units > 0
    }
    if impossible := [stage for stage, times in able.items() if not times]:
        raise ValueError(
            f"no pool of {', '.join(names)} can do {impossible[0]}: add a pool, or a smaller model "
            "or task."
        )
    # Scale the variables to y_i / min_j (t_ij / n_j) and n_j w_j, so that no coefficient is below
    # the solver's tolerances. A stage that takes some pool no time is free.
    smallest = {
        stage: min(t / pools[name] for name, t in times.items()) for stage, times in able.items()
    }
    paid = [stage for stage in able if smallest[stage] > 0]
    if not paid:
        return 0.0
    rows = [[0.0] * len(paid) + [1.0] * len(names)]
    for i, stage in enumerate(paid):
        for name, t in able[stage].items():
            row = [0.0] * (len(paid) + len(names))
            row[i], row[len(paid) + names.index(name)] = 1.0, -t / pools[name] / smallest[stage]
            rows.append(row)
    gains = [work[stage] * smallest[stage] for stage in paid]
    objective = [-gain / sum(gains) for gain in gains] + [0.0] * len(names)
    found = linprog(objective, rows, [1.0] + [0.0] * (len(rows) - 1), options=_TOLERANCES)
    shares = found.x[len(paid) :]
    weights = {name: float(share) / pools[name] for name, share in zip(names, shares, strict=True)}
    least = {stage: min(t * weights[n] for n, t in times.items()) for stage, times in able.items()}
    return sum(work[stage] * value for stage, value in least.items())
