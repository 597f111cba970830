"""Claims in memory: one owner, one finish, reissue once, in whatever order things happen. On a
store: tests/cluster."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.schedule import ScheduleSpec, Task, version_queue
from digenrl.schedule import claims as module
from digenrl.schedule.claims import (
    NOBODY,
    Claim,
    ClaimError,
    Claims,
    MemoryClaims,
    Owner,
    evaluation_pieces,
    evaluation_queue,
)

SPEC = ScheduleSpec(prompts=4, group_size=2, task_size=1, denoise_steps=4, trained_steps=3)
TASKS = version_queue(SPEC, 0, 0)
WHOLE = range(len(TASKS))


def ranks(count: int) -> tuple[MemoryClaims, list[Claims]]:
    store = MemoryClaims()
    return store, [Claims(store, rank) for rank in range(count)]


def test_each_task_is_finished_once_and_late_results_are_refused() -> None:
    store, (one, two, _) = ranks(3)
    first = one.take_next_task(0, TASKS, WHOLE)
    assert first is not None
    store.lost.add(0)
    assert one.return_lost_tasks(0, "died", 1) == ["task 0 of step 0 (group 0)"]
    assert one.return_lost_tasks(0, "died", 1) == []  # the same loss, told twice
    again = two.take_next_task(0, TASKS, WHOLE)
    assert again == Claim(0, 1, attempt=1)
    assert not one.accepts_result(0, first)
    assert not one.give_task(0, first, 1)
    assert two.accepts_result(0, again)
    two.mark_received(0, 0)
    assert two.return_lost_tasks(1, "died", 1) == [], "what all trainers hold does not go back"


def test_a_task_that_kills_its_owners_is_named() -> None:
    _, (one, two) = ranks(2)
    one.take_next_task(0, TASKS, WHOLE)
    one.return_lost_tasks(0, "died", 1)
    two.take_next_task(0, TASKS, WHOLE)
    with pytest.raises(ClaimError, match=r"task 0 of step 0 .* lost 2 owners.*rank 1"):
        two.return_lost_tasks(1, "died", 1)


def test_machines_that_vanish_are_no_sign_against_a_task() -> None:
    """Spot GPUs go at any time; deaths of processes still count, in whatever order."""
    _, owners = ranks(5)
    for number, owner in enumerate(owners[:3]):
        assert owner.take_next_task(0, TASKS, WHOLE) == Claim(0, number, number)
        owner.return_lost_tasks(number, "gave no sign of life", 1, machine_lost=True)
    assert owners[3].take_next_task(0, TASKS, WHOLE) == Claim(0, 3, 3)
    owners[3].return_lost_tasks(3, "died", 1)
    assert owners[4].take_next_task(0, TASKS, WHOLE) == Claim(0, 4, 4)
    with pytest.raises(ClaimError, match="lost 2 owners, the last being rank 4"):
        owners[4].return_lost_tasks(4, "died", 1)


def test_trainers_begin_with_the_head_of_a_queue_and_rollouts_behind_it() -> None:
    """Each goes on in the other's part when its own is empty. A loss frees what was claimed, and
    leaves the rest of the head where it is."""
    _, (trainer, rollout) = ranks(2)
    trainer.begin_behind(0, 3)
    taken = [
        trainer.take_next_task(0, TASKS, WHOLE, ahead=True),
        rollout.take_next_task(0, TASKS, WHOLE),
    ]
    assert [claim and claim.position for claim in taken] == [0, 3]
    assert (trainer.head_left(0), rollout.unclaimed_tasks(0, len(TASKS), WHOLE)) == (2, 6)
    assert rollout.return_lost_tasks(1, "died", 1) == ["task 3 of step 0 (group 1)"]
    assert (rollout.head_left(0), rollout.unclaimed_tasks(0, len(TASKS), WHOLE)) == (2, 7)
    others = [rollout.take_next_task(0, TASKS, WHOLE) for _ in range(6)]
    assert [claim and claim.position for claim in others] == [3, 4, 5, 6, 7, 1]
    assert trainer.take_next_task(0, TASKS, WHOLE, ahead=True) == Claim(2, 0, 0)
    assert trainer.take_next_task(0, TASKS, WHOLE, ahead=True) is None


class Meanwhile(MemoryClaims):
    """A store in which other ranks do something right before a change of a name."""

    happens: tuple[str, Callable[[], object]] | None = None

    def _let_others(self, call: str) -> None:
        if self.happens is not None and self.happens[0] == call:
            (_, others), self.happens = self.happens, None
            others()

    def add_to_counter(self, name: str, amount: int = 0) -> int:
        if amount:
            self._let_others("count")
        return super().add_to_counter(name, amount)

    def replace_owner(self, version: int, position: int, old: Owner | None, new: Owner) -> bool:
        self._let_others("change")
        return super().replace_owner(version, position, old, new)


def test_a_rank_that_comes_second_to_the_last_task_gets_none() -> None:
    """The late rank's count is beyond the queue's end. When that rank dies, nobody gets the
    position."""
    store = Meanwhile()
    one, two = Claims(store, 0), Claims(store, 1)
    last, part = TASKS[:1], range(1)
    store.happens = "count", lambda: two.take_next_task(0, last, part)
    assert one.take_next_task(0, last, part) is None
    assert (store.task_owner(0, 0) or NO_OWNER).rank == 1
    assert store.add_to_counter("claim/v0") == 2
    assert one.return_lost_tasks(0, "died", 1) == []
    assert store.returned_positions(0) == [1]
    assert (one.count_returned(0, 1), one.take_next_task(0, last, part)) == (0, None)


NO_OWNER = Owner(NOBODY, 0, NOBODY, -1, -1, -1)


def test_a_rank_that_dies_before_it_enters_its_name_loses_the_task_once() -> None:
    store = Meanwhile()
    one, two = Claims(store, 0), Claims(store, 1)
    store.happens = "change", lambda: two.return_lost_tasks(0, "died", 1)
    assert one.take_next_task(0, TASKS, WHOLE) == Claim(1, 0, 0), (
        "the next one; the first is free again"
    )
    assert store.task_owner(0, 0) == NO_OWNER
    assert two.take_next_task(0, TASKS, WHOLE) == Claim(0, 1, 0)


def test_a_rank_whose_task_was_taken_meanwhile_gives_nothing_away() -> None:
    store = Meanwhile()
    one, two = Claims(store, 0), Claims(store, 1)
    claim = one.take_next_task(0, TASKS, WHOLE)
    assert claim is not None
    store.happens = "change", lambda: two.return_lost_tasks(0, "died", 1)
    assert not one.give_task(0, claim, 1)
    again = two.take_next_task(0, TASKS, WHOLE)
    assert again == Claim(0, 1, 1)
    store.happens = "change", lambda: one.return_lost_tasks(1, "died", 1)
    with pytest.raises(ClaimError, match="lost 2 owners"):
        two.confirm_claim(0, 0, 1)


def test_a_store_in_memory_changes_only_what_it_should() -> None:
    store = MemoryClaims()
    assert (store.newest_version(), store.lost_ranks(), store.task_owner(0, 0)) == (0, set(), None)
    entry = Owner.of_task(3, 0, TASKS[0])
    assert not store.replace_owner(0, 0, entry, NO_OWNER)
    assert store.task_owner(0, 0) is None
    assert store.replace_owner(0, 0, None, entry)
    assert not store.replace_owner(0, 0, None, NO_OWNER)
    assert store.task_owner(0, 0) == entry
    claims = Claims(store, 3)
    claims.mark_received(0, 0)
    assert [claims.held_by(0, 0, trainers) for trainers in (1, 2)] == [True, False]
    piece = Task(step=2, index=1, group=1, first_sample=0, samples=0, version=-3)
    assert evaluation_pieces(2, 2)[1] == piece


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["claim", "done", "die", "give"]), max_size=80),
    st.integers(2, 5),
    st.integers(0, len(TASKS)),
)
def test_no_task_is_lost_or_doubled(actions: list[str], count: int, head: int) -> None:
    store, everyone = ranks(count)
    everyone[0].begin_behind(0, head)
    mine: dict[int, list[Claim]] = {rank: [] for rank in range(count)}
    finished: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_DEATHS", 10**6)
        for number, action in enumerate(actions):
            rank, other = number % count, (number + 1) % count
            if action == "claim":
                claim = everyone[rank].take_next_task(0, TASKS, WHOLE, ahead=rank == 0)
                mine[rank] += [claim] if claim is not None else []
            elif action == "done" and mine[rank]:
                claim = mine[rank].pop()
                assert everyone[rank].accepts_result(0, claim)
                everyone[rank].mark_received(0, claim.position)
                finished.append(claim.position)
            elif action == "give" and mine[rank]:
                claim = mine[rank].pop()
                assert everyone[rank].give_task(0, claim, other)
                assert not everyone[rank].accepts_result(0, claim)
                confirmed = everyone[other].confirm_claim(0, claim.position, claim.attempt)
                assert confirmed is not None
                mine[other].append(confirmed)
            elif action == "die":
                assert len(everyone[rank].return_lost_tasks(rank, "died", 1)) == len(mine[rank])
                mine[rank].clear()
            owned = [claim.position for claims in mine.values() for claim in claims]
            assert len({*owned, *finished}) == len(owned) + len(finished)
            assert everyone[0].unclaimed_tasks(0, len(TASKS), WHOLE) == len(TASKS) - len(
                owned
            ) - len(finished)
            for rank_, claims in mine.items():
                for claim in claims:
                    owner = store.task_owner(0, claim.position)
                    assert owner is not None
                    assert (owner.rank, owner.giver) == (rank_, NOBODY)


def test_pieces_of_an_evaluation_are_claimed_as_tasks_are() -> None:
    """A piece goes back with a rank that died or left, unless trainer 0 has received the piece."""
    store = MemoryClaims(version=3)
    one, two = Claims(store, 0), Claims(store, 1)
    queue, pieces = evaluation_queue(3), evaluation_pieces(3, 3)
    first, second = (one.take_next_task(queue, pieces, range(3)) for _ in pieces[:2])
    assert first is not None
    assert second is not None
    one.mark_received(queue, first.position, trainers=2)
    one.release_claim(queue, second)
    assert one.offer_released_tasks(0) == ["piece 1 of the evaluation of version 3"]
    assert two.take_next_task(queue, pieces, range(3)) == Claim(1, 1, 0)
    assert two.return_lost_tasks(0, "died", 2) == [], "a piece that has arrived is not made again"
    assert two.return_lost_tasks(1, "died", 2) == ["piece 1 of the evaluation of version 3"]
    assert one.take_next_task(queue, pieces, range(3)) == Claim(1, 0, 1)
    with pytest.raises(ClaimError, match=r"piece 1 of the evaluation of version 3 lost 2 owners"):
        two.return_lost_tasks(0, "died", 2)
    one.forget_old_queues(5)
    assert one.accepts_result(queue, Claim(1, 0, 1)) is False
    counters = ("claim/v3", "head/v3", "ahead/v3", "claim/v4")
    for name in counters:
        store.add_to_counter(name, 2)
    store.add_returned(3, [1])
    store.forget_queue(3)
    assert [*map(store.add_to_counter, counters), *store.returned_positions(3)] == [0, 0, 0, 2]
