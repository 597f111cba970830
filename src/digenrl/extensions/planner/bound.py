"""Shortest RL step that any schedule can reach: the linear programme of the design. Its stages are
encode, generate, decode, score and train; their units are prompts, samples, samples, samples and
cells.

Minimise T with sum_j x_ij = work_i for every stage i and sum_i x_ij t_ij <= n_j T for every pool j
of n_j equal GPUs. HiGHS solves its dual: maximise sum_i work_i y_i with y_i <= t_ij w_j and sum_j
n_j w_j <= 1.
"""

from __future__ import annotations

from collections.abc import Mapping

from digenrl.extensions.planner.candidate import Candidate
from digenrl.extensions.planner.costing import Costing
from digenrl.extensions.planner.workload import Workload
from digenrl.recompute import Recompute

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


def work_units(work: Workload) -> dict[str, float]:
    """Return stage -> units of work in one RL step."""
    return {
        "encode": float(work.prompts),
        "generate": float(work.samples),
        "decode": float(work.samples),
        "score": float(work.samples),
        "train": float(work.cells),
    }


def seconds_per_unit(costing: Costing) -> dict[str, dict[str, float | None]]:
    """Return stage -> pool -> seconds per unit at the best batch size, without communication and
    recomputation."""
    costs, work = costing.costs, costing.work
    group, trained = work.group_size, work.trained_steps
    table: dict[str, dict[str, float | None]] = {stage: {} for stage in work_units(work)}
    for pool in costing.hardware.pools:
        table["encode"][pool.name] = costs.encode_seconds(pool)
        table["generate"][pool.name] = work.steps * costs.step_seconds(pool, group) / group
        table["decode"][pool.name] = costs.decode_seconds(pool, 1)
        table["score"][pool.name] = costs.score_seconds(pool, 1)
        table["train"][pool.name] = costs.cell_seconds(pool, group, trained, Recompute()) / group
    return table


def step_bound(costing: Costing) -> float:
    """Return the shortest RL step, in seconds, that any schedule can reach on this profile."""
    pools = {pool.name: pool.count for pool in costing.hardware.pools}
    return solve_bound(pools, work_units(costing.work), seconds_per_unit(costing))


def bound_of_roles(costing: Costing, candidate: Candidate) -> float:
    """Return the shortest RL step, in seconds, of all schedules that keep the candidate's roles of
    ranks."""
    counts, units = costing.place_ranks(candidate).counts, work_units(costing.work)
    seats = {f"{pool} {role}": count for (pool, role), count in counts.items()}
    table: dict[str, dict[str, float | None]] = {stage: {} for stage in units}
    for pool, role in counts:
        makes = role == "rollout" or candidate.rollouts == 0 or candidate.spec.tag
        for stage, seconds in seconds_per_unit(costing).items():
            able = role == "trainer" if stage == "train" else makes
            table[stage][f"{pool} {role}"] = seconds[pool] if able else None
    return solve_bound(seats, units, table)
