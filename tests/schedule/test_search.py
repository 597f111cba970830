"""BTS: never worse than not lending under its own costs."""

from __future__ import annotations

import time
from dataclasses import astuple, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.schedule.search import (
    Decision,
    LendingMonitor,
    LendingState,
    _Point,
    _Search,
    accepted_claims,
    after_older,
    search_loans,
)


@st.composite
def states(draw: st.DrawFn) -> LendingState:
    ranks = draw(st.integers(0, 6))
    fragments = draw(st.integers(1, 8))
    tasks = tuple(draw(st.lists(st.integers(0, 5), min_size=fragments, max_size=fragments)))
    times = st.floats(0.01, 5.0)
    return LendingState(
        rollout_free=tuple(draw(st.lists(st.floats(0, 5.0), min_size=ranks, max_size=ranks))),
        rollout_seconds=tuple(draw(st.lists(times, min_size=ranks, max_size=ranks))),
        tasks_left=sum(tasks),
        fragment_tasks=tasks,
        fragment_ready=tuple(
            draw(st.lists(st.floats(0, 5.0), min_size=fragments, max_size=fragments))
        ),
        train_seconds=tuple(
            draw(st.lists(st.floats(0, 3.0), min_size=fragments, max_size=fragments))
        ),
        lend_seconds=draw(times),
        lenders=draw(st.integers(1, 4)),
        lenders_later=draw(st.integers(0, 4)),
        switch_seconds=draw(st.floats(0, 1.0)),
        ahead=draw(st.booleans()),
        may_lend=draw(st.booleans()),
    )


@settings(deadline=None)
@given(states(), st.integers(1, 4))
def test_never_worse_than_not_lending(state: LendingState, k_max: int) -> None:
    decision = search_loans(state, k_max)
    assert decision.predicted_step_s <= decision.predicted_without + 1e-9
    assert 0 <= decision.lend <= k_max
    if not state.may_lend or state.tasks_left == 0:
        assert decision.lend == 0


@settings(deadline=None)
@given(states())
def test_i6_nothing_is_lent_while_a_fragment_is_ready(state: LendingState) -> None:
    ready = replace(
        state,
        fragment_tasks=(0, *state.fragment_tasks[1:]),
        tasks_left=sum(state.fragment_tasks[1:]),
        fragment_ready=(0.0, *state.fragment_ready[1:]),
    )
    assert search_loans(ready).lend == 0


def test_the_next_step_is_worth_a_loan_only_inside_the_wait() -> None:
    def state(ready: float, later: int) -> LendingState:
        return LendingState(
            (9.0,), (10.0,), 0, (0,), (ready,), (1.0,), 4.0, 2, 0, 0.1, tasks_later=later
        )

    assert search_loans(state(9.0, 0)).lend == 0
    assert (
        search_loans(state(9.0, 8)).lend == 2
    )  # two rounds of 4 s and two switches end before 9 s
    assert [search_loans(state(9.0, 8), k_max).lend for k_max in (1, 2, 3)] == [1, 2, 2]
    assert search_loans(state(9.0, 2)).lend == 1
    assert search_loans(state(3.0, 8)).lend == 0
    assert search_loans(replace(state(9.0, 8), may_lend=False)).lend == 0
    decision = search_loans(state(9.0, 8))
    assert decision.gain == 0.0


def test_a_lender_is_alone_and_switches_for_nothing_unless_somebody_says_so() -> None:
    assert astuple(LendingState((), (), 0, (), (), (), 2.0))[7:] == (1, 0, 0.0, 0, 0, False, True)
    assert astuple(LendingMonitor()) == (3, 0, 0.0, 0.0, False)


def test_older_tasks_come_first() -> None:
    free, ready = after_older((1.0, 2.0), (4.0, 10.0), (0.5, 3.0, 7.0), (2, 0, 1))
    assert free == (
        9.0,
        12.0,
    )  # the fast rank ends tasks at 5 and 9, and the slow one its first at 12
    assert ready == (9.0, 3.0, 12.0)


def test_lends_in_a_long_bubble_and_waits_in_a_short_one() -> None:
    state = LendingState(
        (0.0, 0.0), (10.0, 10.0), 8, (4, 4), (0.0, 0.0), (1.0, 1.0), 5.0, 2, switch_seconds=0.1
    )
    assert search_loans(state).lend > 0
    assert search_loans(state).gain > 0
    costly = replace(state, switch_seconds=100.0)
    assert search_loans(costly) == Decision(
        0, 41.0, 41.0
    )  # 4 rounds of 2 tasks, then the last fragment


@pytest.mark.parametrize(
    ("free", "rollout", "tasks", "train", "lend", "switch"),
    [
        (4.0, 5.0, (4, 4), 1.0, 4.0, 0.0),
        (4.0, 5.0, (4, 4), 2.0, 4.0, 0.0),
        (4.0, 5.0, (2, 2, 2), 3.0, 1.0, 0.5),
        (4.0, 3.0, (2, 2, 2), 2.0, 1.0, 0.0),
    ],
)
def test_the_unit_of_time_decides_nothing(
    free: float, rollout: float, tasks: tuple[int, ...], train: float, lend: float, switch: float
) -> None:
    """Loans before a later fragment gain too, and a gain counts however small its number is. The
    other unit, 1024 s, is exact in floats."""
    found = []
    for unit in (1.0, 1024.0):
        state = LendingState(
            (free / unit,), (rollout / unit,), sum(tasks), tasks, (0.0,) * len(tasks),
            (train / unit,) * len(tasks), lend / unit, 1, switch_seconds=switch / unit,
        )  # fmt: skip
        lent, seconds, without = astuple(search_loans(state))
        found.append((lent, seconds * unit, without * unit))
    assert found[0] == found[1]
    assert found[0][0] > 0


def test_of_equally_good_loans_that_outlast_the_wait_the_smallest_is_made() -> None:
    """A rollout rank makes a task in 3 s, the trainer in 4 s. One loan before each fragment ends as
    early as two before the first."""
    state = LendingState(
        (0.0,), (3.0,), 6, (2, 2, 2), (0.0,) * 3, (1.0,) * 3, 4.0, 1, switch_seconds=0.5
    )
    assert search_loans(state) == Decision(1, 13.0, 19.0)


def test_fast_trainers_make_the_first_fragment_of_a_step() -> None:
    """Two trainers make a task in 2 s, four rollout ranks in 8 s. If trainers may claim first, they
    make the first fragment in 4 s, and train it while rollouts make the second. Behind the claims
    of the rollouts, the loan only helps with the second fragment, and both are trained after 8 s."""
    state = LendingState(
        (0.0,) * 4, (8.0,) * 4, 8, (4, 4), (0.0, 0.0), (3.0, 3.0), 2.0, lenders=2, ahead=True
    )
    assert search_loans(state) == search_loans(state, k_max=2) == Decision(2, 11.0, 19.0)
    assert search_loans(state, k_max=1).lend == 1
    behind = search_loans(replace(state, ahead=False))
    assert (behind.lend, behind.predicted_step_s) == (2, 14.0)


def test_a_loan_is_made_by_the_trainers_that_are_there_then() -> None:
    state = LendingState((), (), 9, (9,), (0.0,), (1.0,), 2.0, lenders=2, lenders_later=3)
    later = [_Search(state, 1).lend_rounds(_Point(0, now, 0, 0, ()), 1) for now in (0.0, 1.0)]
    assert [point.lent for point in later if point is not None] == [2, 3]


def test_what_is_left_of_the_next_step_is_shared_by_speed() -> None:
    """The rollout rank makes 0.25 tasks a second, the lenders 1. After 8 s the rollout rank has
    made 2 of 12."""
    state = LendingState(
        (0.0,), (4.0,), 0, (0,), (0.0,), (1.0,), 2.0, lenders=2, tasks_later=12, later_taken=1
    )
    assert _Search(state, 1).spare_tasks(8.0) == pytest.approx(0.8 * (12 + 1 - 2) - 1)


def test_a_fixed_policy_lends_the_rounds_that_fit_into_a_wait() -> None:
    """A rollout rank makes four tasks at 3, 6, 9 and 12 s. Three loans of 2 s fit into the 6 s before
    the first fragment, and spare the rank all but the first task."""
    state = LendingState((0.0,), (3.0,), 4, (2, 2), (0.0, 0.0), (1.0, 1.0), 2.0, 1)
    start = _Point(0, 0.0, 0, 0, ())
    assert _Search(state, 8).follow_policy(start, None) == 13.0
    assert _Search(state, 8).follow_policy(start, False) == 8.0


@settings(deadline=None)
@given(states(), st.integers(0, 2))
def test_following_a_policy_is_walking_from_point_to_point(state: LendingState, lend: int) -> None:
    tree = _Search(state, 4)
    here = start = tree.lend_rounds(_Point(0, 0.0, 0, 0, ()), lend) or _Point(0, 0.0, 0, 0, ())
    while here is not None and here.fragment < len(state.fragment_tasks):
        here = tree.train_fragment(here)
    assert tree.follow_policy(start, None) == (float("inf") if here is None else here.now)


def test_search_takes_milliseconds() -> None:
    free = tuple(0.1 * i for i in range(24))
    state = LendingState(
        free, (3.0,) * 24, 288, (6,) * 48, (0.0,) * 48, (0.7,) * 48, 4.0, 8, switch_seconds=0.05
    )
    best = min(_timed(state) for _ in range(5))
    assert best < 0.05


def _timed(state: LendingState) -> float:
    begin = time.perf_counter()
    search_loans(state)
    return time.perf_counter() - begin


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 5)), min_size=1, max_size=5),
    st.integers(0, 30),
)
def test_accepted_claims_are_the_earliest_finishing_ones(
    ranks: list[tuple[float, float]], tasks: int
) -> None:
    free, seconds = tuple(f for f, _ in ranks), tuple(s for _, s in ranks)
    _, finishes = accepted_claims(free, seconds, tasks)
    every = sorted(f + (j + 1) * s for f, s in ranks for j in range(tasks))
    assert sorted(finishes) == pytest.approx(every[:tasks])
