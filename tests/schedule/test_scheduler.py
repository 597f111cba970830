"""The scheduler: what it decides."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.schedule import ScheduleSpec, version_queue
from digenrl.schedule.ranks import Roles, Work, declines_task, finished_before
from digenrl.schedule.scheduler import ASK, LEND, TRAIN, WAIT, Scheduler, record_header
from digenrl.schedule.search import Decision, LendingMonitor
from digenrl.schedule.timesteps import cells_by_rank

SPEEDS = st.lists(st.floats(0.05, 20.0), min_size=1, max_size=8)
SPEC = ScheduleSpec(
    prompts=2, group_size=8, task_size=2, denoise_steps=4, trained_steps=3, gap=1, tag=True
)
PENDING = ((0,), (1,))
TRAIN_S, TASK_S = 0.5, 1.0


def makespan(seconds: list[float], tasks: int) -> float:
    """List scheduling with the decline rule, every rank free at 0."""
    costs, free, left = dict(enumerate(seconds)), dict.fromkeys(range(len(seconds)), 0.0), tasks
    now = 0.0
    while left:
        takers = [
            r for r in costs if free[r] <= now and not declines_task(r, now, costs, free, left)
        ]
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


@settings(max_examples=60, deadline=None)
@given(SPEEDS, st.integers(1, 40), st.integers(0, 7), st.floats(0.0, 3.0))
def test_many_left_never_contradicts_the_count(
    seconds: list[float], left: int, rank: int, now: float
) -> None:
    """The short cut takes a task only where counting what the others end would take it too."""
    rank %= len(seconds)
    scheduler = Scheduler(SPEC, Roles(0, len(seconds)), lambda version: ())
    for other, cost in enumerate(seconds):
        scheduler.saw_rank(other, Work(0, cost))
    if scheduler.many_left(rank, left):
        assert not declines_task(rank, now, dict(enumerate(seconds)), {}, left)


@pytest.mark.parametrize(("rank", "other"), [(0, 1), (1, 0)])
def test_tasks_are_counted_exactly_where_a_division_is_not(rank: int, other: int) -> None:
    """In floats (1.7 - 0) / 0.1 is less than 17, and 17 x 0.1 is more than 1.7. Costs in tenths are
    tried, with the neighbouring floats of each moment. The result must be that of counting."""
    for free, seconds, n in itertools.product((0.0, 0.1, 0.7, 2.3), range(1, 12), range(24)):
        cost = seconds / 10
        end = free + n * cost
        for time in (end, math.nextafter(end, 9.0), math.nextafter(end, -1.0), round(end, 1)):
            ends = (free + number * cost for number in range(1, 30))
            counted = sum((each, rank) < (time, other) for each in ends)
            assert finished_before(free, cost, rank, time, other) == counted
    for never in (0.0, -1.0, math.inf):
        assert finished_before(0.0, never, rank, 9.0, other) == 0


def test_a_slow_rank_leaves_the_last_task_to_a_fast_one() -> None:
    assert declines_task(1, 0.0, {0: 1.0, 1: 10.0}, {0: 0.5}, 1)
    assert not declines_task(1, 0.0, {0: 1.0, 1: 10.0}, {0: 0.5}, 10)
    assert [declines_task(rank, 0.0, {0: 1.0, 1: 1.0}, {}, 1) for rank in (0, 1)] == [
        False,
        True,
    ]  # a tie has one taker


@pytest.mark.parametrize("head", [0, 8])
def test_a_rank_of_unknown_speed_takes_a_task(head: int) -> None:
    """The rank takes one even if only the head of the queue is left, which trainers want to
    make."""
    scheduler = Scheduler(SPEC, Roles(1, 2), lambda version: ())
    scheduler.saw_rank(1, Work(0, 1.0))
    scheduler.saw_rank(2, Work(0))
    assert scheduler.takes(2, 0, 8, 0.0, head)


def test_a_rank_that_joined_generates_as_long_as_it_is_there() -> None:
    """A rank that joins counts with the speed that it reports. A first rollout counts before it has
    begun."""
    scheduler = Scheduler(SPEC, Roles(1, 1), lambda version: ())
    for rank in (1, 2):
        scheduler.saw_rank(rank, Work(0, 2.0))
    assert scheduler._generators == {1, 2}
    assert scheduler._costs == {("generate", 2): 2.0}
    scheduler.measured("generate", 2, 4.0)
    assert scheduler._costs == {("generate", 2): 4.0}, "what its pool lets expect is a guess"
    for rank in (1, 2):
        scheduler.saw_rank(rank, None)
    assert scheduler._generators == {1}


def trainer_scheduler(
    trainers: int, rollouts: int, spec: ScheduleSpec = SPEC, **roles: Any
) -> Scheduler:
    scheduler = Scheduler(
        spec, Roles(trainers, rollouts, **roles), lambda version: version_queue(spec, version, 2)
    )
    fragment = (0,)
    scheduler.measured("train", 0, TRAIN_S / cells_by_rank(spec, trainers, False, fragment)[0])
    for rank in range(trainers + rollouts):
        scheduler.measured("generate", rank, TASK_S)
    return scheduler


def test_what_nobody_has_said_yet() -> None:
    assert Work() == (-1, 0.0, -1, -1, 0.0)
    roles = Roles(1, 2)
    assert (roles.lockstep, roles.split) == (False,) * 2
    assert record_header(SPEC, roles, 7) == {
        "spec": asdict(SPEC),
        "roles": asdict(roles),
        "last_step": 7,
    }


def test_the_rollout_rank_that_is_free_first() -> None:
    scheduler = trainer_scheduler(1, 2)
    assert scheduler.first_free(0.0) is None
    for rank, until in ((0, 0.5), (1, 9.0), (2, 3.0)):  # rank 0 is a trainer
        scheduler.saw_rank(rank, Work(0, TASK_S, 0, 0, until))
    assert scheduler.first_free(1.0) == 2


@pytest.mark.parametrize(("until", "lends"), [(2.5, True), (0.0, False)], ids=["lending", "done"])
def test_a_fragment_in_another_lenders_hands_is_not_ready(until: float, lends: bool) -> None:
    """All of group 0 is claimed. While trainer 1 still generates its last task, trainer 0 has time
    for a task of group 1. If nobody generates, trainer 0 only waits for the result, and must not
    begin anything (I6)."""
    scheduler = trainer_scheduler(2, 1)
    scheduler.saw_rank(2, Work(0, TASK_S))
    scheduler.saw_rank(1, Work(0, TASK_S, 0, 0, until) if until else Work(0, TASK_S))
    left = len(version_queue(SPEC, 0, 2)) - SPEC.tasks_per_group
    assert (scheduler.lend(0, 0, PENDING, (0, left), 0.0) > 0) == lends


def test_a_group_of_the_next_step_in_flight_holds_up_nothing() -> None:
    """The rollout rank runs group 0 of the next step: this step's group 0 is done."""
    scheduler = trainer_scheduler(1, 1)
    scheduler.saw_rank(1, Work(0, TASK_S, 1, 0, 9.0))
    assert scheduler.predicted_end(0, 0, PENDING[:1], (0, 0), 0.0) == pytest.approx(TRAIN_S)
    scheduler.saw_rank(1, Work(0, TASK_S, 0, 0, 9.0))
    assert scheduler.predicted_end(0, 0, PENDING[:1], (0, 0), 0.0) == pytest.approx(9.0 + TRAIN_S)


def test_a_step_is_predicted_with_loans_only_where_trainers_may_lend() -> None:
    left = len(version_queue(SPEC, 0, 2))

    def end(scheduler: Scheduler) -> float:
        scheduler.saw_rank(1, Work(0, TASK_S))
        found = scheduler.predicted_end(0, 0, PENDING, (0, left), 5.0)
        assert found is not None
        return found

    lending, plain = trainer_scheduler(1, 1), trainer_scheduler(1, 1, replace(SPEC, tag=False))
    assert 5.0 < end(lending) < end(plain)
    lending._trainers[0].monitor.off = True
    assert end(lending) == end(plain)


def test_the_next_steps_tasks_fill_a_wait_for_older_ones() -> None:
    """Asynchrony of one step, every group stale. Only holders of version 0 may generate what step 1
    still lacks. So a trainer of version 1 lends to step 2, but only while it waits."""
    spec = replace(SPEC, async_steps=1, stale_fraction=1.0)
    scheduler = trainer_scheduler(1, 1, spec)
    scheduler.saw_rank(1, Work(0, TASK_S, 1, 1, 0.5))
    own = len(version_queue(spec, 1, 2))
    assert (
        scheduler.lend(0, 1, PENDING[1:], (2, own), 0.0) == 2
    )  # the rollout rank ends its three tasks after 2.5 s
    assert scheduler.lend(0, 1, PENDING[1:], (2, 0), 0.1) == 0


def test_a_loan_of_the_next_step_is_not_begun_where_the_fragment_is_ready_sooner() -> None:
    """A task takes 1 s, the fragment is ready in 0.15 s, and a task of the next step runs to its
    end."""
    spec = replace(SPEC, async_steps=1, stale_fraction=1.0)
    scheduler = trainer_scheduler(1, 1, spec)
    scheduler.saw_rank(1, Work(0, TASK_S, 1, 1, 0.15))
    assert scheduler.lend(0, 1, PENDING[1:], (0, len(version_queue(spec, 1, 2))), 0.0) == 0


def test_switching_costs_count() -> None:
    """Waiting is better than a loan whose two switches take longer than it saves."""
    scheduler = trainer_scheduler(1, 1)
    scheduler.saw_rank(1, Work(0, TASK_S))
    left = len(version_queue(SPEC, 0, 2))
    assert scheduler.lend(0, 0, PENDING, (0, left), 0.0) > 0
    scheduler.measured("switch", 0, 100.0)
    assert scheduler.lend(0, 0, PENDING, (0, left), 0.1) == 0


def test_I6_a_ready_fragment_comes_first_and_foreign_weights_lend_nothing() -> None:
    scheduler = trainer_scheduler(1, 1)
    assert scheduler.next_move(0, 0, PENDING, None, 0, 8) == ASK
    assert scheduler.next_move(0, 0, PENDING, None, 0, 8, 2) == LEND
    assert scheduler.next_move(0, 0, PENDING, (0,), 1, 7) == TRAIN
    assert scheduler.next_move(0, 0, PENDING[1:], None, 1, 7) == ASK, (
        "the rest of a loan ends with the wait"
    )
    assert scheduler.next_move(0, 0, PENDING[1:], None, 1, 7, 0) == WAIT
    assert scheduler.next_move(0, 0, PENDING[1:], None, 1, 7) == WAIT, (
        "nothing has happened since the last answer"
    )
    assert scheduler.next_move(0, 0, PENDING[1:], None, 1, 6) == ASK
    after = trainer_scheduler(1, 1)
    assert after.next_move(0, 1, PENDING, None, 0, 8) == ASK, "trainers keep the published weights"
    alone = trainer_scheduler(1, 0)
    assert alone.next_move(0, 1, PENDING, None, 0, 8) == WAIT, (
        "after an update colocated ranks have the published weights no more"
    )
    off = trainer_scheduler(1, 1, replace(SPEC, tag=False))
    assert off.next_move(0, 0, PENDING, None, 0, 8) == WAIT


def test_colocated_ranks_generate_everything_before_an_update_takes_the_version_away() -> None:
    spec = ScheduleSpec(4, 2, 1, 4, 3, updates_per_batch=2, gap=1)
    scheduler = Scheduler(spec, Roles(1, 0), lambda version: version_queue(spec, version, 2))
    assert scheduler.next_move(0, 0, PENDING, (0,), 1, 4) == TRAIN
    assert scheduler.next_move(0, 0, PENDING[1:], (1,), 2, 4) == ASK, (
        "the last fragment of the first update waits"
    )
    assert scheduler.next_move(0, 0, PENDING[1:], (1,), 4, 0) == TRAIN


def test_monitor_switches_off_when_the_error_exceeds_the_gain() -> None:
    monitor = LendingMonitor()
    good = Decision(1, 10.0, 15.0)
    assert [monitor.record_loan(good, 11.0) for _ in range(10)] == [None] * 10
    messages = [monitor.record_loan(good, 40.0) for _ in range(5)]
    assert any(message and "switched itself off" in message for message in messages)
    assert monitor.off
    assert LendingMonitor().record_loan(Decision(0, 1.0, 1.0), 99.0) is None


def test_costs_start_from_the_profile_and_follow_measurements() -> None:
    scheduler = Scheduler(SPEC, Roles(1, 1), lambda version: ())
    scheduler.expected("train", 0, 2.0)
    assert scheduler._costs["train", 0] == 2.0
    scheduler.measured("train", 0, 4.0)
    assert scheduler._costs["train", 0] == 4.0, (
        "a profile's figure is a guess, a measurement is not"
    )
    scheduler.measured("train", 0, 9.0)
    assert scheduler._costs["train", 0] == pytest.approx(5.0)
    with pytest.raises(ValueError, match="give seconds"):
        scheduler.measured("train", 0, float("nan"))


def test_a_loan_behind_the_head_is_not_judged_in_its_place() -> None:
    """A trainer takes a task of the queue's head without a search. Its next loan has little left to
    gain, so the monitor must not compare that one with the whole step."""
    scheduler = trainer_scheduler(1, 1)
    scheduler.saw_rank(1, Work(0, TASK_S))
    left = len(version_queue(SPEC, 0, 2))
    assert scheduler.lend(0, 0, PENDING, (0, left), 0.0, 1) == 1
    assert scheduler.lend(0, 0, PENDING, (0, left - 1), 0.1) > 0
    facts = scheduler.loan_facts(0, 1.0)
    assert facts is not None
    assert facts["rounds"] == 0.0


def test_a_steps_first_tasks_go_to_idle_trainers_where_the_step_ends_sooner() -> None:
    """No rollout rank holds version 1 yet. A trainer that is as fast as the rollout rank takes
    tasks; with costly switches it takes none."""
    scheduler = trainer_scheduler(1, 1)
    scheduler.saw_rank(1, Work(0, TASK_S))
    left = (0, len(version_queue(SPEC, 1, 2)))
    assert scheduler.opens(0, 1, PENDING, left, 0.0) > 0
    scheduler.measured("switch", 0, 100.0)
    assert scheduler.opens(0, 1, PENDING, left, 0.1) == 0
