"""The linear programme, against closed forms and a reference solver."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from digenrl.extensions.planner.bound import solve_bound


def test_one_speed_is_total_work_over_total_speed() -> None:
    seconds = {"generate": {"fast": 1.0, "slow": 4.0}, "train": {"fast": 2.0, "slow": 8.0}}
    bound = solve_bound({"fast": 2, "slow": 4}, {"generate": 10.0, "train": 5.0}, seconds)
    assert bound == pytest.approx((10 * 1.0 + 5 * 2.0) / (2 + 4 / 4))


def test_work_goes_where_it_is_relatively_cheap_and_possible() -> None:
    seconds = {"generate": {"a": 1.0, "b": 1.0}, "train": {"a": 1.0, "b": None}}
    assert solve_bound({"a": 1, "b": 1}, {"generate": 4.0, "train": 6.0}, seconds) == pytest.approx(
        6.0
    )
    with pytest.raises(ValueError, match="no pool of b can do train"):
        solve_bound(
            {"b": 1},
            {"generate": 1.0, "train": 1.0},
            {k: {"b": v["b"]} for k, v in seconds.items()},
        )
    free = {"encode": {"b": 0.0}, "train": {}}  # costs nothing, and has no work
    assert solve_bound({"b": 1}, {"encode": 3.0, "train": 0.0}, free) == 0.0


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 5))
def test_equals_a_reference_solver(data: st.DataObject, pools: int, stages: int) -> None:
    times = st.floats(0.05, 20.0)
    counts = {str(j): data.draw(st.integers(1, 9)) for j in range(pools)}
    work = {str(i): data.draw(st.floats(0.5, 100.0)) for i in range(stages)}
    seconds = {i: {j: data.draw(times) for j in counts} for i in work}
    columns = [(i, j) for i in work for j in counts]
    equal = [[1.0 if i == stage else 0.0 for i, _ in columns] + [0.0] for stage in work]
    upper = [
        [seconds[i][j] if j == pool else 0.0 for i, j in columns] + [-float(counts[pool])]
        for pool in counts
    ]
    cost = [0.0] * len(columns) + [1.0]
    expected = linprog(
        cost, A_ub=upper, b_ub=[0.0] * pools, A_eq=equal, b_eq=list(work.values())
    ).fun
    assert solve_bound(counts, work, seconds) == pytest.approx(expected, rel=1e-9)
