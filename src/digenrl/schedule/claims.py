"""Claims: a state machine that assigns tasks to ranks, for the runtime, emulated ranks and the
simulator.

    unclaimed -> owned -> received                  the usual life of a task
    owned -> owned by another rank                  a suspended task moves; the attempt id stays
    owned -> returned -> owned, attempt + 1         its owner was lost

A queue may have a *head*: its first tasks, which trainers mean to generate themselves (TAG).
Trainers claim from the head first, and rollouts from behind it. Each goes on in the other part when
its own is empty. So a head changes the order of claims, and reserves nothing.

Invariants:
1. One rank at a time runs a task, and a task is finished once. A late result of a lost owner is
   refused.
2. When an owner is lost, its task goes back exactly once, with a new attempt id. A task that an
   owner released before it left goes back with the same attempt id.

A `ClaimStore` keeps the claims: in the run's control store (`digenrl.cluster.claims`), or in
memory. Every transition is one atomic operation of the store, so no rank needs another's
permission. Pure: standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from digenrl.schedule.spec import Task

MAX_DEATHS = 2
"""Owners of a task whose processes may die. Then the task counts as the cause (a poisoned prompt, a
broken reward). Machines that vanish are no sign of that: spot GPUs go at any time."""
NOBODY = -1
_FORGET_AFTER = 2
"""Age, in published versions, at which a queue has no task left that a rank waits for."""
_FORGET_QUEUE_AFTER = 1000
"""Age, in published versions, at which the rest of a queue is deleted. A rank that slept so long is
lost, so no rank can start the queue's counter again from 0."""


class ClaimError(RuntimeError):
    """A task kept losing its owners."""


class Claim(NamedTuple):
    """Right of a rank to run a task. A claim lasts as long as the rank lives, as the launcher sees
    it."""

    position: int
    """Position in the queue (not the task's index within its RL step)."""
    rank: int
    attempt: int
    """Attempt id: 0 for the first owner, one more after each loss. A suspended task that moves
    keeps its id."""


class Owner(NamedTuple):
    """The owner of a task, as the store keeps it."""

    rank: int
    """Rank that runs the task; NOBODY for a task that came back."""
    attempt: int
    giver: int
    """Rank that gave the suspended task away, until the receiver confirms; else NOBODY."""
    step: int
    number: int
    group: int
    deaths: int = 0
    """Owners whose processes died while they had the task."""

    @classmethod
    def of_task(cls, rank: int, attempt: int, task: Task, deaths: int = 0) -> Owner:
        """Return the entry with which `rank` takes `task`."""
        return cls(rank, attempt, NOBODY, task.step, task.index, task.group, deaths)


class ClaimStore(Protocol):
    """Keeps the claims of all queues. Each queue belongs to the weight version that generates its
    tasks; a version's evaluation has a queue too (`evaluation_queue`)."""

    def add_to_counter(self, name: str, amount: int = 0) -> int:
        """Add `amount` to counter `name` (0 at first) and return the sum: atomic."""

    def task_owner(self, version: int, position: int) -> Owner | None:
        """Return the owner of a task; None before any rank owned it."""

    def replace_owner(self, version: int, position: int, old: Owner | None, new: Owner) -> bool:
        """Replace the owner of a task if it still is `old`, and return whether it was: atomic.
        `new` differs from `old`."""

    def forget_task(self, version: int, position: int) -> None:
        """Delete everything about one task."""

    def forget_queue(self, version: int) -> None:
        """Delete everything about a queue except its tasks."""

    def returned_positions(self, version: int) -> Sequence[int]:
        """Return the positions that have come back so far, in rising order; some may have a new
        owner."""

    def add_returned(self, version: int, positions: Sequence[int]) -> None:
        """Add positions that came back. All calls must come from one process."""

    def newest_version(self) -> int:
        """Return the number of the newest published version."""

    def lost_ranks(self) -> frozenset[int]:
        """Return the ranks that died while the run went on."""


@dataclass
class MemoryClaims:
    """A `ClaimStore` in the memory of one process, for the simulator."""

    version: int = 0
    """Number of the newest published version."""
    lost: set[int] = field(default_factory=set)
    _counts: Counter[str] = field(default_factory=Counter)
    _owners: dict[tuple[int, int], Owner] = field(default_factory=dict)
    _returned: dict[int, set[int]] = field(default_factory=dict)

    def add_to_counter(self, name: str, amount: int = 0) -> int:
        if amount:
            self._counts[name] += amount
        return self._counts[name]

    def task_owner(self, version: int, position: int) -> Owner | None:
        return self._owners.get((version, position))

    def replace_owner(self, version: int, position: int, old: Owner | None, new: Owner) -> bool:
        if self._owners.get((version, position)) != old:
            return False
        self._owners[version, position] = new
        return True

    def forget_task(self, version: int, position: int) -> None:
        self._owners.pop((version, position), None)

    def forget_queue(self, version: int) -> None:
        for name in (f"claim/v{version}", f"head/v{version}", head_name(version)):
            self._counts.pop(name, None)
        self._returned.pop(version, None)

    def returned_positions(self, version: int) -> Sequence[int]:
        return sorted(self._returned[version]) if version in self._returned else ()

    def add_returned(self, version: int, positions: Sequence[int]) -> None:
        self._returned.setdefault(version, set()).update(positions)

    def newest_version(self) -> int:
        return self.version

    def lost_ranks(self) -> frozenset[int]:
        return frozenset(self.lost)


class Claims:
    """Claims, gives away, confirms and refuses tasks on behalf of one rank.

    Example:
        >>> store, tasks = MemoryClaims(), [Task(0, n, n, 0, 2, 0) for n in range(2)]
        >>> [Claims(store, rank).take_next_task(0, tasks, range(2)) for rank in (4, 5, 6)]
        [Claim(position=0, rank=4, attempt=0), Claim(position=1, rank=5, attempt=0), None]
        >>> store.lost.add(4)
        >>> _ = Claims(store, 0).return_lost_tasks(4, "killed", trainers=1)
        >>> Claims(store, 6).take_next_task(0, tasks, range(2))
        Claim(position=0, rank=6, attempt=1)
    """

    def __init__(self, store: ClaimStore, rank: int) -> None:
        self._store, self._rank = store, rank
        self._heads: dict[int, int] = {}
        """Version -> tasks of its queue's head, which is fixed before this rank may claim."""

    # ---- generating ranks

    def take_next_task(
        self, version: int, tasks: Sequence[Task], part: range, ahead: bool = False
    ) -> Claim | None:
        """Claim the next task of a queue: one that came back, else the counter's next. Return None
        when no task is left.

        Args:
            tasks: the version's whole queue.
            part: positions that the counter runs over: all of them, or this rank's own part of a
                divided queue.
            ahead: claim from the queue's head first, else from behind the head first.

        Example:
            Two ranks share a queue of four tasks. None is taken twice:

            >>> tasks = tuple(Task(0, i, 0, 4 * i, 4, 0) for i in range(4))
            >>> store = MemoryClaims()
            >>> one, other = Claims(store, rank=2), Claims(store, rank=3)
            >>> [r.take_next_task(0, tasks, range(4)).position for r in (one, other, other, one)]
            [0, 1, 2, 3]
            >>> one.take_next_task(0, tasks, range(4))  # none is left
        """
        for position, owner in self._waiting_tasks(version, len(tasks)):
            own = Owner.of_task(self._rank, owner.attempt, tasks[position], owner.deaths)
            if self._store.replace_owner(version, position, owner, own):
                return Claim(position, self._rank, owner.attempt)
        parts = [(queue_name(version, part, len(tasks)), part)]
        if head := self.head_size(version):
            parts.insert(0 if ahead else 1, (head_name(version), range(head)))
        for name, positions in parts:
            # Read before the add: ranks that poll an empty queue must not raise its counter without
            # bound.
            while self._store.add_to_counter(name) < len(positions):
                number = self._store.add_to_counter(name, 1) - 1
                if number >= len(positions):
                    break
                position = positions[number]
                # Fails when `return_lost_tasks` gave the position back first, in the moment after
                # the add.
                if self._store.replace_owner(
                    version, position, None, Owner.of_task(self._rank, 0, tasks[position])
                ):
                    return Claim(position, self._rank, 0)
        return None

    def unclaimed_tasks(self, version: int, tasks: int, part: range) -> int:
        """Count the tasks of the queue that have no owner and no result."""
        claimed = self._store.add_to_counter(queue_name(version, part, tasks))
        left = max(0, len(part) - claimed) + self.head_left(version)
        return left + self.count_returned(version, tasks)

    def head_size(self, version: int) -> int:
        """Return how many tasks the head of the version's queue has."""
        if version not in self._heads:
            self._heads[version] = self._store.add_to_counter(f"head/v{version}")
        return self._heads[version]

    def head_left(self, version: int) -> int:
        """Count the tasks of the queue's head that no rank has claimed."""
        head = self.head_size(version)
        return max(0, head - self._store.add_to_counter(head_name(version))) if head else 0

    def give_task(self, version: int, claim: Claim, receiver: int) -> bool:
        """Make `receiver` the owner of this rank's task, and return whether that worked.

        False has two reasons: the receiver is lost, and this rank keeps the task; or this rank is
        no longer the owner, and its work would be refused.
        """
        owner = self._store.task_owner(version, claim.position)
        if owner is None or (owner.rank, owner.attempt) != (self._rank, claim.attempt):
            return False
        given = owner._replace(rank=receiver, giver=self._rank)
        if not self._store.replace_owner(version, claim.position, owner, given):
            return False
        # The receiver may die meanwhile. It is marked as lost before its tasks are gathered. So
        # either the gathering sees the new owner, or the mark is visible here.
        lost = receiver in self._store.lost_ranks()
        return not lost or not self._store.replace_owner(version, claim.position, given, owner)

    def confirm_claim(self, version: int, position: int, attempt: int) -> Claim | None:
        """Return the claim of a task that was given to this rank; None when another rank has it by
        now."""
        owner = self._store.task_owner(version, position)
        if owner is None or (owner.rank, owner.attempt) != (self._rank, attempt):
            return None
        if not self._store.replace_owner(version, position, owner, owner._replace(giver=NOBODY)):
            return None
        return Claim(position, self._rank, attempt)

    def release_claim(self, version: int, claim: Claim) -> None:
        """Give up this rank's task unfinished. `offer_released_tasks` offers the task again once
        the rank has left."""
        owner = self._store.task_owner(version, claim.position)
        # OWNED -> NOBODY. Another owner or attempt: the task came back and went on elsewhere.
        if owner is not None and (owner.rank, owner.attempt) == (self._rank, claim.attempt):
            self._store.replace_owner(
                version, claim.position, owner, owner._replace(rank=NOBODY, giver=NOBODY)
            )

    # ---- trainers

    def begin_behind(self, version: int, head: int) -> None:
        """Make the first `head` tasks of a queue its head. Trainer 0 calls this before any rank can
        hold the version."""
        self._heads[version] = head
        # Both counters: `claim` starts behind the head, and `head` says where it ends.
        for name in ("head", "claim"):
            self._store.add_to_counter(f"{name}/v{version}", head)

    def accepts_result(self, version: int, claim: Claim) -> bool:
        """Return whether a result made under `claim` counts: the task's present owner must have
        made it."""
        owner = self._store.task_owner(version, claim.position)
        return owner is not None and (owner.rank, owner.attempt) == (claim.rank, claim.attempt)

    def mark_received(self, version: int, position: int, trainers: int = 1) -> None:
        """Count `trainers` more trainers that hold a task's result, each once per task."""
        self._store.add_to_counter(_received_name(version, position), trainers)

    def held_by(self, version: int, position: int, trainers: int) -> bool:
        """Return whether `trainers` trainers hold a task's result."""
        return self._store.add_to_counter(_received_name(version, position)) >= trainers

    def count_returned(self, version: int, tasks: int) -> int:
        """Count the tasks of a queue that came back and wait for an owner."""
        return sum(1 for _ in self._waiting_tasks(version, tasks))

    def forget_old_queues(self, version: int) -> None:
        """Delete what no rank needs once `version` is published: the tasks of old queues, and the
        rest of very old ones."""
        # Late results still ask who owns their task, so owners outlive the version for a while.
        for number in _queues_of(version - _FORGET_AFTER):
            for position in self._claimed_positions(number):
                self._store.forget_task(number, position)
        for number in _queues_of(version - _FORGET_QUEUE_AFTER):
            self._store.forget_queue(number)

    # ---- whoever notices a loss: who hosts the store

    def offer_released_tasks(self, rank: int) -> list[str]:
        """Offer again the tasks that `rank` released, and those that were given to it since. Return
        their names for the log.

        The rank has left and is marked as lost. The tasks that it finished count.
        """
        return self._offer_again(partial(self._free_released, rank))

    def return_lost_tasks(
        self, rank: int, cause: str, trainers: int, machine_lost: bool = False
    ) -> list[str]:
        """Give back every task that `rank` owned and that not all trainers hold. Return their names
        for the log.

        The rank must be dead and marked as lost. With `machine_lost` its whole machine vanished,
        which no task can have caused.

        Raises:
            ClaimError: the processes of MAX_DEATHS owners of a task died.
        """
        free = partial(self._free_lost, rank, cause, trainers, not machine_lost)
        return self._offer_again(free)

    def _offer_again(self, free: Callable[[int, int], str | None]) -> list[str]:
        """Give back the open tasks for which `free` (version, position) returns a name, "" if no
        rank had entered one."""
        names: list[str] = []
        newest = self._store.newest_version()
        # With one-step asynchrony the version before the newest still generates.
        for version in (*_queues_of(newest - 1), *_queues_of(newest)):
            found = {
                position: free(version, position) for position in self._claimed_positions(version)
            }
            back = [position for position, name in found.items() if name is not None]
            if back:
                self._store.add_returned(version, back)
            names += filter(None, found.values())
        return names

    def _free_released(self, rank: int, version: int, position: int) -> str | None:
        """Return the name of a task that `rank` released, or that was given to it meanwhile."""
        owner = self._store.task_owner(version, position)
        # A task given to this rank that it never confirmed: the giver has stopped, so no rank runs
        # it.
        if owner is not None and owner.rank == rank and owner.giver != NOBODY:
            free = owner._replace(rank=NOBODY, giver=NOBODY)
            owner = free if self._store.replace_owner(version, position, owner, free) else None
        if (
            owner is None
            or owner.rank != NOBODY
            or position in self._store.returned_positions(version)
        ):
            return None
        return _task_name(version, owner)

    def _free_lost(
        self, rank: int, cause: str, trainers: int, died: bool, version: int, position: int
    ) -> str | None:
        """Take the task at `position` from `rank`, which died, and return the task's name."""
        while True:
            owner = self._store.task_owner(version, position)
            # The counter has passed this position, but the claimant has not entered its name:
            # perhaps it was the rank that died in between. A live claimant's own compare-and-set
            # then fails, and it claims another task.
            if owner is None:
                nobody = Owner(NOBODY, 0, NOBODY, -1, -1, -1)
                if self._store.replace_owner(version, position, None, nobody):
                    return ""
                continue
            if rank not in (owner.rank, owner.giver) or self.held_by(version, position, trainers):
                return None
            name, deaths = _task_name(version, owner), owner.deaths + died
            if died and deaths >= MAX_DEATHS:
                raise ClaimError(
                    f"{name} lost {deaths} owners, the last being rank {rank}, which {cause}: "
                    "the task itself is the likely cause. Look at its prompt and its reward."
                )
            freed = owner._replace(
                rank=NOBODY, attempt=owner.attempt + 1, giver=NOBODY, deaths=deaths
            )
            if self._store.replace_owner(version, position, owner, freed):
                return name

    def _waiting_tasks(self, version: int, tasks: int) -> Iterator[tuple[int, Owner]]:
        """Yield (position, owner entry) of the tasks that came back and have no owner.

        Positions beyond the queue's end are skipped: ranks that ask for the last task at one moment
        take the counter past it.
        """
        for position in self._store.returned_positions(version):
            owner = self._store.task_owner(version, position) if position < tasks else None
            if owner is not None and owner.rank == NOBODY:
                yield position, owner

    def _claimed_positions(self, version: int) -> Iterator[int]:
        """Yield the positions of the queue that may have an owner."""
        head = self.head_size(version)
        yield from range(head - self.head_left(version))
        yield from range(head, self._store.add_to_counter(f"claim/v{version}"))


def evaluation_queue(version: int) -> int:
    """Return the number of the queue of the pieces of the evaluation of `version`. Weights for that
    evaluation, if they differ from the policy's (for example a moving average), are published under
    the same number. A negative number never collides with a version."""
    return -1 - version


def evaluation_pieces(version: int, pieces: int) -> tuple[Task, ...]:
    """Return the queue of the pieces of the evaluation of `version`."""
    queue = evaluation_queue(version)
    return tuple(Task(version, piece, piece, 0, 0, queue) for piece in range(pieces))


def _queues_of(version: int) -> tuple[int, ...]:
    """Return the queues of a version: its tasks, and its evaluation."""
    return (version, evaluation_queue(version)) if version >= 0 else ()


def queue_name(version: int, part: range, tasks: int) -> str:
    """Return the name of a queue's counter, or of that for one rank's part of a divided queue."""
    return f"claim/v{version}" if len(part) == tasks else f"claim/v{version}/{part.start}"


def head_name(version: int) -> str:
    """Return the name of the counter of claims in a queue's head."""
    return f"ahead/v{version}"


def queue_part(tasks: int, number: int, count: int) -> range:
    """Return the positions of the `number`-th of `count` equal parts of a divided queue.

    Example:
        >>> [queue_part(tasks=10, number=number, count=3) for number in range(3)]
        [range(0, 3), range(3, 6), range(6, 10)]
    """
    return range(number * tasks // count, (number + 1) * tasks // count)


def _received_name(version: int, position: int) -> str:
    """Return the name of the counter of trainers that hold a result."""
    return f"got/v{version}/{position}"


def _task_name(queue: int, owner: Owner) -> str:
    if queue < 0:
        return f"piece {owner.number} of the evaluation of version {owner.step}"
    return f"task {owner.number} of step {owner.step} (group {owner.group})"
