"""Claims on a real store: one owner, one result that counts, tasks that come back, and the makespan
of declining."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.cluster.claims import StoredClaims, announce_work, note_version, work_of
from digenrl.cluster.control import Control
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.store import StoreClient, StoreServer
from digenrl.cluster.world import World
from digenrl.schedule import ScheduleSpec, Task, version_queue
from digenrl.schedule.claims import Claim, ClaimError, Claims, MemoryClaims
from digenrl.schedule.ranks import Roles, Work
from digenrl.schedule.scheduler import Scheduler
from digenrl.strategy.tasks import TaskRunner
from tests.schedule.test_figures import Drawing, life_of_claims

SPEC = ScheduleSpec(prompts=3, group_size=4, task_size=2, denoise_steps=4, trained_steps=3)
TASKS = version_queue(SPEC, 0, 0)
WHOLE = range(len(TASKS))
TRAINERS = 2


class Store:
    """A fresh control store at each call."""

    def __init__(self) -> None:
        self._servers: list[StoreServer] = []

    def controls(self, ranks: int) -> tuple[Control, list[Control]]:
        """The launcher's, and one per rank."""
        handshake = Handshake()
        server = StoreServer(socket.create_server(("127.0.0.1", 0)), handshake)
        self._servers.append(server)
        store = StoreClient(server.host, server.port, handshake)
        controls = [Control(store, rank) for rank in range(-1, ranks)]
        return controls[0], controls[1:]

    def close(self) -> None:
        for server in self._servers:
            server.close()


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.close()


def ranks_of(store: Store, ranks: int = 4) -> tuple[Claims, list[Claims], Control]:
    launcher, controls = store.controls(ranks)
    claims = [Claims(StoredClaims(control), rank) for rank, control in enumerate(controls)]
    note_version(launcher, 0)
    return Claims(StoredClaims(launcher), -1), claims, launcher


def lose(launcher: Claims, control: Control, rank: int) -> list[str]:
    control.mark_lost(rank)
    return launcher.return_lost_tasks(rank, "was killed", TRAINERS)


def test_every_task_has_one_owner_and_two_parts_never_meet(store: Store) -> None:
    _, (a, b, *_), _ = ranks_of(store)
    taken = [claims.take_next_task(0, TASKS, WHOLE) for claims in (a, b, a, b, b, a, a, b)]
    assert [None if claim is None else claim.position for claim in taken] == [
        0,
        1,
        2,
        3,
        4,
        5,
        None,
        None,
    ]
    assert a.unclaimed_tasks(0, len(TASKS), WHOLE) == 0
    halves = [range(0, 3), range(3, 6)]
    mine = [
        [c.take_next_task(1, TASKS, part) for _ in range(4)]
        for c, part in zip((a, b), halves, strict=True)
    ]
    assert [[c.position for c in own if c is not None] for own in mine] == [[0, 1, 2], [3, 4, 5]]
    a.begin_behind(2, 2)
    headed = [b.take_next_task(2, TASKS, WHOLE), a.take_next_task(2, TASKS, WHOLE, ahead=True)]
    assert [claim and claim.position for claim in headed] == [2, 0]
    assert (b.head_left(2), b.unclaimed_tasks(2, len(TASKS), WHOLE)) == (1, 4)


def test_a_lost_owners_task_goes_back_once_and_its_late_result_is_refused(store: Store) -> None:
    launcher, (trainer, other, dead, receiver), control = ranks_of(store)
    first, second, third = (
        dead.take_next_task(0, TASKS, WHOLE),
        dead.take_next_task(0, TASKS, WHOLE),
        receiver.take_next_task(0, TASKS, WHOLE),
    )
    assert first is not None
    assert second is not None
    assert third is not None
    for claims in (trainer, other):  # the first task arrived at both trainers, the second at one
        assert claims.accepts_result(0, first)
        claims.mark_received(0, first.position)
    trainer.mark_received(0, second.position)
    assert lose(launcher, control, 2) == ["task 1 of step 0 (group 0)"]
    assert lose(launcher, control, 2) == []
    assert not other.accepts_result(0, second), "the old owner's late result"
    assert receiver.unclaimed_tasks(0, len(TASKS), WHOLE) == len(TASKS) - 2
    again = receiver.take_next_task(0, TASKS, WHOLE)
    assert again == Claim(second.position, 3, attempt=1)
    assert other.accepts_result(0, again)
    assert not other.accepts_result(0, second)
    assert other.accepts_result(0, third), "what others own is not touched"
    assert receiver.take_next_task(0, TASKS, WHOLE) == Claim(3, 3, attempt=0)


def test_a_task_that_loses_its_second_owner_is_named_as_the_cause(store: Store) -> None:
    launcher, (_, one, two, three), control = ranks_of(store)
    one.take_next_task(0, TASKS, WHOLE)
    lose(launcher, control, 1)
    assert two.take_next_task(0, TASKS, WHOLE) == Claim(0, 2, attempt=1)
    with pytest.raises(
        ClaimError, match=r"task 0 of step 0 \(group 0\) lost 2 owners, the last being rank 2"
    ):
        lose(launcher, control, 2)
    assert three.take_next_task(0, TASKS, WHOLE) == Claim(1, 3, attempt=0)


def test_a_claim_that_was_not_noted_yet_is_made_anew(store: Store) -> None:
    """The dead rank took a number and died before it wrote its name."""
    launcher, (_, alive, _, _), control = ranks_of(store)
    control.add("claim/v0", 1)
    assert lose(launcher, control, 2) == []
    assert [alive.take_next_task(0, TASKS, WHOLE) for _ in range(2)] == [
        Claim(0, 1, 0),
        Claim(1, 1, 0),
    ]


@pytest.mark.parametrize("died", ["giver", "receiver"])
def test_a_task_handed_over_outlives_either_death(store: Store, died: str) -> None:
    launcher, (trainer, giver, receiver, third), control = ranks_of(store)
    claim = giver.take_next_task(0, TASKS, WHOLE)
    assert claim is not None
    assert giver.give_task(0, claim, 2)
    assert not trainer.accepts_result(0, claim), "the giver's own result no longer counts"
    lose(launcher, control, {"giver": 1, "receiver": 2}[died])
    assert receiver.confirm_claim(0, 0, 0) is None, "on its way when it was given to somebody else"
    assert third.take_next_task(0, TASKS, WHOLE) == Claim(0, 3, attempt=1)


def test_a_task_handed_over_and_confirmed_belongs_to_its_heir(store: Store) -> None:
    launcher, (trainer, giver, receiver, _), control = ranks_of(store)
    claim = giver.take_next_task(0, TASKS, WHOLE)
    assert claim is not None
    assert giver.give_task(0, claim, 2)
    confirmed = receiver.confirm_claim(0, 0, 0)
    assert confirmed == Claim(0, 2, 0)
    assert lose(launcher, control, 1) == []
    assert trainer.accepts_result(0, confirmed)


def test_nothing_is_given_to_a_lost_rank(store: Store) -> None:
    _, (trainer, giver, *_), control = ranks_of(store)
    claim = giver.take_next_task(0, TASKS, WHOLE)
    assert claim is not None
    control.mark_lost(2)
    assert not giver.give_task(0, claim, 2)
    assert trainer.accepts_result(0, claim)


def test_old_queues_leave_the_store(store: Store) -> None:
    _, (trainer, rollout, *_), control = ranks_of(store)
    claim = rollout.take_next_task(0, TASKS, WHOLE)
    assert claim is not None
    trainer.mark_received(0, 0)
    trainer.forget_old_queues(1)
    assert trainer.accepts_result(0, claim)
    trainer.forget_old_queues(2)
    assert not trainer.accepts_result(0, claim)
    assert control.get("owner/v0/0") is None
    assert control.get("got/v0/0") is None
    control.set("returned/v0", "0")
    trainer.forget_old_queues(999)
    assert control.get("claim/v0") == "1", "a rank that slept must not start the counter again"
    trainer.forget_old_queues(1000)
    assert control.get("claim/v0") is None
    assert control.get("returned/v0") is None


@pytest.mark.parametrize("seed", range(12))
def test_a_store_of_a_run_answers_as_one_in_memory(store: Store, seed: int) -> None:
    launcher, _ = store.controls(0)
    note_version(launcher, 1)
    stored, memory = StoredClaims(launcher), MemoryClaims(version=1)
    assert (stored.newest_version(), stored.lost_ranks()) == (1, frozenset())
    lives = (
        [*life_of_claims(Drawing(seed), claims, lose)]
        for claims, lose in ((stored, launcher.mark_lost), (memory, memory.lost.add))
    )
    one, other = lives
    assert one == other
    stored.forget_queue(0)
    assert [
        *map(stored.add_to_counter, ("claim/v0", "head/v0", "ahead/v0")),
        *stored.returned_positions(0),
    ] == [
        0,
        0,
        0,
    ]


def test_what_ranks_do_is_told_to_all(store: Store) -> None:
    launcher, _ = store.controls(0)
    assert StoredClaims(launcher).newest_version() == 0
    works = {0: Work(3, 0.1 + 0.2, 4, 1, 7.25), 1: None, 2: Work(), 5: Work(1, 1e-9)}
    for rank, work in works.items():
        announce_work(launcher, rank, work)
    assert work_of(launcher, range(3)) == {rank: works[rank] for rank in range(3)}
    for rank in (5, 6):
        launcher.add_joined_rank(rank)
    assert work_of(launcher, [2, 0]) == {2: Work(), 0: works[0], 5: works[5], 6: None}
    launcher.mark_lost(0)
    assert work_of(launcher, [0])[0] is None


class Clock:
    """A span log's clock, set by hand."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


def runner_of(
    spec: ScheduleSpec,
    tasks: tuple[Task, ...],
    control: Control,
    rank: int,
    ranks: int,
    clock: Clock,
) -> TaskRunner:
    """A rollout rank's claims, without anything to generate with."""
    nothing = cast(Any, None)
    scheduler = Scheduler(spec, Roles(0, ranks), lambda version: tasks)
    return TaskRunner(
        spec, World(rank, 0, ranks), scheduler, lambda version: tasks, nothing, nothing, nothing, control, nothing,
        cast(Any, clock),
    )  # fmt: skip


@settings(max_examples=10, deadline=None)
@given(st.lists(st.floats(0.05, 20.0), min_size=1, max_size=6), st.integers(1, 20))
@pytest.mark.heavy
def test_decline_makespan_of_the_runtime(store: Store, seconds: list[float], groups: int) -> None:
    """n equal tasks on m ranks of measured constant speed, all free at 0: (1 + (m-1)/n) x total
    work / total speed.

    The worker's own claim and decline, in virtual time."""
    spec = ScheduleSpec(prompts=groups, group_size=2, task_size=2, denoise_steps=4, trained_steps=3)
    tasks, clock = version_queue(spec, 0, 0), Clock()
    controls = store.controls(len(seconds))[1]
    runners = [
        runner_of(spec, tasks, control, rank, len(seconds), clock)
        for rank, control in enumerate(controls)
    ]
    for runner, cost in zip(runners, seconds, strict=True):
        runner._task_seconds = cost
        runner.announce_work(version=0)
    busy_until = dict.fromkeys(range(len(seconds)), 0.0)
    while runners[0].unclaimed_tasks(0):
        for rank, runner in enumerate(runners):
            if (
                busy_until[rank] <= clock.time
                and runner.takes_next_task(0)
                and (task := runner.claim_task(0)) is not None
            ):
                runner.announce_work(0, task, share=1.0)
                busy_until[rank] = clock.time + seconds[rank]
        later = [time for time in busy_until.values() if time > clock.time]
        assert later, "every rank declined: the queue stands still"
        clock.time = min(later)
        for rank, runner in enumerate(runners):
            if busy_until[rank] <= clock.time:
                runner.announce_work(0)
    bound = len(tasks) / sum(1.0 / cost for cost in seconds)
    assert max(busy_until.values()) <= (1 + (len(seconds) - 1) / len(tasks)) * bound * (1 + 1e-9)


def test_a_rank_declines_only_for_ranks_that_can_take_the_task(store: Store) -> None:
    """A rank that is lost, that has gone on to the next version, or whose speed is unknown does not
    count."""
    _, controls = store.controls(2)
    clock = Clock()
    slow, fast = (
        runner_of(SPEC, TASKS[:1], control, rank, 2, clock) for rank, control in enumerate(controls)
    )
    slow._task_seconds = 10.0
    slow.announce_work(0)
    assert slow.takes_next_task(0), "nobody knows how fast the other is"
    fast._task_seconds = 1.0
    fast.announce_work(0)
    assert not slow.takes_next_task(0)
    assert fast.takes_next_task(0)
    fast.announce_work(1)
    assert slow.takes_next_task(0)
    fast.announce_work(-1)
    assert not slow.takes_next_task(0), "it has yet to adopt the version"
    controls[0].mark_lost(1)
    assert slow.takes_next_task(0)
