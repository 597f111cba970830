"""Claims: one owner, one finish, reissue once, and the makespan of declining and of hand-off."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.schedule import ScheduleSpec, queue
from digenrl.schedule.claims import MAX_ATTEMPTS, ClaimBook, ClaimError, declines, hands_over, swaps, yields
from digenrl.simulate.virtual_cluster import Cluster, Rank
from digenrl.simulate.virtual_run import simulate

SPEEDS = st.lists(st.floats(0.05, 20.0), min_size=1, max_size=8)


def book(tasks: int = 6, max_attempts: int = MAX_ATTEMPTS) -> ClaimBook:
    spec = ScheduleSpec(prompts=tasks // 2, group_size=2, task_size=1, denoise_steps=4, trained_steps=3)
    return ClaimBook(queue(spec, 0, 0), max_attempts)


def makespan(seconds: list[float], tasks: int) -> float:
    """List scheduling with the decline rule, every rank free at 0."""
    costs, free, left = dict(enumerate(seconds)), dict.fromkeys(range(len(seconds)), 0.0), tasks
    now = 0.0
    while left:
        takers = [r for r in costs if free[r] <= now and not declines(r, now, costs, free, left)]
        if takers:
            free[takers[0]] = now + costs[takers[0]]
            left -= 1
        else:
            now = min(time for time in free.values() if time > now)
    return max(free.values())


@settings(deadline=None)
@given(SPEEDS, st.integers(1, 60))
def test_decline_makespan(seconds: list[float], tasks: int) -> None:
    bound = tasks / sum(1.0 / s for s in seconds)
    assert makespan(seconds, tasks) <= (1 + (len(seconds) - 1) / tasks) * bound * (1 + 1e-9)


def test_a_slow_rank_leaves_the_last_task_to_a_fast_one() -> None:
    assert declines(1, 0.0, {0: 1.0, 1: 10.0}, {0: 0.5}, 1)
    assert not declines(1, 0.0, {0: 1.0, 1: 10.0}, {0: 0.5}, 10)
    assert [declines(rank, 0.0, {0: 1.0, 1: 1.0}, {}, 1) for rank in (0, 1)] == [False, True]  # a tie has one taker


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.1, 3.0), min_size=1, max_size=6), st.integers(0, 12), st.integers(2, 10))
def test_handoff_makespan(steps: list[float], extra: int, denoise: int) -> None:
    """With levelling, generation ends at most one denoising step of each rank above total work / total speed."""
    tasks = len(steps) + extra + (len(steps) + extra) % 2
    spec = ScheduleSpec(
        prompts=tasks // 2, group_size=2, task_size=1, denoise_steps=denoise, trained_steps=1, handoff=True
    )
    ranks = [Rank(0, "trainer", "p", math.inf), *(Rank(1 + i, "rollout", "p", s) for i, s in enumerate(steps))]
    result = simulate(spec, Cluster(tuple(ranks)), steps=1, trace=True)
    end = max(span.end for span in result.spans if span.stage == "generate")
    bound = tasks * denoise / sum(1.0 / s for s in steps)
    assert end <= bound + sum(steps) * (1 + 1e-9)


def test_each_task_is_finished_once_and_late_results_are_refused() -> None:
    claims = book(4)
    first = claims.claim(7)
    assert first is not None
    assert claims.owner_died(7) == [0]
    assert claims.owner_died(7) == []  # the same loss, told twice
    again = claims.claim(8)
    assert again is not None
    assert (again.position, again.attempt) == (0, 1)
    assert not claims.done(0, 7, 0)
    assert not claims.suspend(first)
    assert claims.done(0, 8, 1)
    assert not claims.done(0, 8, 1)


def test_a_task_that_kills_its_owners_is_named() -> None:
    claims = book(2, max_attempts=2)
    claims.claim(0)
    claims.owner_died(0)
    claims.claim(1)
    with pytest.raises(ClaimError, match=r"task 0 of step 0 .* lost 2 owners.*rank 1"):
        claims.owner_died(1)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["claim", "done", "die", "suspend"]), max_size=80), st.integers(2, 5))
def test_no_task_is_lost_or_doubled(actions: list[str], ranks: int) -> None:
    claims = book(8, max_attempts=10**6)
    for number, action in enumerate(actions):
        rank = number % ranks
        mine = [c for c in claims.owners.values() if c.rank == rank]
        if action == "claim" and not mine:
            claims.claim(rank)
        elif action == "done" and mine:
            assert claims.done(mine[0].position, rank, mine[0].attempt)
        elif action == "suspend" and mine:
            assert claims.suspend(mine[0])
        elif action == "die":
            claims.owner_died(rank)
        states = [*claims.owners, *claims.suspended, *claims.lost, *claims.finished]
        states += list(range(claims.next_position, len(claims.tasks)))
        assert sorted(states) == list(range(8))
        assert claims.unclaimed == len(claims.waiting())


def test_a_task_moves_only_to_a_rank_that_ends_it_earlier() -> None:
    assert hands_over(5, 2.0, [1.0], move_seconds=4.0)
    assert not hands_over(5, 2.0, [1.0], move_seconds=5.0)
    assert not hands_over(5, 1.0, [1.0, 2.0])


def test_levelling_prefers_clearly_longer_tasks_in_the_tail_only() -> None:
    assert swaps(6, [8, 20], ranks=2) == 1
    assert swaps(6, [8], ranks=2) is None
    assert swaps(1, [20] * 5, ranks=2) is None


def test_a_slow_rank_yields_only_to_a_faster_one_with_clearly_less_to_do() -> None:
    assert yields(9, 2.0, [(3, 1.0)])
    assert not yields(9, 2.0, [(3, 2.0)])
    assert not yields(4, 2.0, [(3, 1.0)])
