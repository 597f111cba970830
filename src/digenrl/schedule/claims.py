"""Claims: who runs which task. One state machine, driven by the runtime, by emulated ranks and by the simulator.

    unclaimed -> owned -> received                  the usual life of a task
    owned -> owned by another rank                  a suspended task moves; the attempt id stays
    owned -> returned -> owned, attempt + 1         its owner was lost

Invariants:
  one owner: a task is run by one rank at a time, and finished once; a late result of a lost owner is refused;
  a task whose owner was lost goes back exactly once per loss, with a new attempt id; one that an owner let go of as it
  left goes back with the same.

Where the claims are kept is a `ClaimStore`: the run's control store (`digenrl.cluster.claims`), or memory. Every
transition is one atomic operation of the store, so nobody is asked. Pure: standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from digenrl.schedule.spec import Task

MAX_ATTEMPTS = 2
"""Owners that a task may lose before it is taken for the cause of their deaths (a poisoned prompt, a broken reward)."""
NOBODY = -1
_FORGET_AFTER = 2
"""Queues of so many published versions ago have no task left that anybody waits for."""
_FORGET_QUEUE_AFTER = 1000
"""A rank that was so many versions asleep is lost, so that nobody begins such a queue anew."""


class ClaimError(RuntimeError):
    """A task kept losing its owners."""


@dataclass(frozen=True)
class Claim:
    """The right of one rank to run one task. It lasts as long as the rank lives, as the launcher sees it."""

    position: int
    """Position in the queue (not the task's index within its RL step)."""
    rank: int
    attempt: int
    """0 for the first owner; a loss adds one, a suspended task that moves keeps it."""


@dataclass(frozen=True)
class Owner:
    """Who runs a task."""

    rank: int
    """NOBODY for a task that came back."""
    attempt: int
    giver: int
    """The rank that gave the suspended task away, until the receiver confirms; else NOBODY."""
    step: int
    index: int
    group: int

    @classmethod
    def of(cls, rank: int, attempt: int, task: Task) -> Owner:
        """`rank` takes `task`."""
        return cls(rank, attempt, NOBODY, task.step, task.index, task.group)


class ClaimStore(Protocol):
    """Keeps the claims of all queues; a queue belongs to the weight version that generates it."""

    def count(self, name: str, amount: int = 0) -> int:
        """The sum of counter `name` after adding `amount`, from 0: atomic."""

    def owner(self, version: int, position: int) -> Owner | None:
        """Who owns a task; None before anybody does."""

    def change(self, version: int, position: int, old: Owner | None, new: Owner) -> bool:
        """Replace a task's owner if it still is `old`: atomic. `new` differs from `old`."""

    def forget(self, version: int, position: int) -> None:
        """Remove what is kept of a task."""

    def forget_queue(self, version: int) -> None:
        """Remove the rest of what is kept of a queue."""

    def returned(self, version: int) -> Sequence[int]:
        """Return the positions that have come back so far, in rising order; some may have a new owner."""

    def add_returned(self, version: int, positions: Sequence[int]) -> None:
        """Note positions that came back. One process alone does so."""

    def newest_version(self) -> int:
        """The newest published version."""

    def lost_ranks(self) -> frozenset[int]:
        """Ranks that died while the run went on."""


@dataclass
class MemoryClaims:
    """A `ClaimStore` for one process: the simulator's."""

    version: int = 0
    """The newest published version."""
    lost: set[int] = field(default_factory=set)
    _counts: dict[str, int] = field(default_factory=dict)
    _owners: dict[tuple[int, int], Owner] = field(default_factory=dict)
    _returned: dict[int, set[int]] = field(default_factory=dict)

    def count(self, name: str, amount: int = 0) -> int:
        total = self._counts.get(name, 0) + amount
        if amount:
            self._counts[name] = total
        return total

    def owner(self, version: int, position: int) -> Owner | None:
        return self._owners.get((version, position))

    def change(self, version: int, position: int, old: Owner | None, new: Owner) -> bool:
        if self._owners.get((version, position)) != old:
            return False
        self._owners[version, position] = new
        return True

    def forget(self, version: int, position: int) -> None:
        self._owners.pop((version, position), None)

    def forget_queue(self, version: int) -> None:
        self._counts.pop(f"claim/v{version}", None)
        self._returned.pop(version, None)

    def returned(self, version: int) -> Sequence[int]:
        return sorted(self._returned[version]) if version in self._returned else ()

    def add_returned(self, version: int, positions: Sequence[int]) -> None:
        self._returned.setdefault(version, set()).update(positions)

    def newest_version(self) -> int:
        return self.version

    def lost_ranks(self) -> frozenset[int]:
        return frozenset(self.lost)


class Claims:
    """A rank's way to claim, give, confirm and refuse tasks."""

    def __init__(self, store: ClaimStore, rank: int) -> None:
        self._store, self._rank = store, rank

    # ---- generating ranks

    def take(self, version: int, tasks: Sequence[Task], part: range) -> Claim | None:
        """Return the next task of a queue: one that came back, else the counter's next; None when none is left.

        Args:
            tasks: the version's whole queue.
            part: positions that the counter runs over (all of them, or this rank's own part of a divided queue).
        """
        for position, owner in self._waiting(version, len(tasks)):
            if self._store.change(version, position, owner, Owner.of(self._rank, owner.attempt, tasks[position])):
                return Claim(position, self._rank, owner.attempt)
        name = queue_name(version, part, len(tasks))
        while self._store.count(name) < len(part):
            number = self._store.count(name, 1) - 1
            if number >= len(part):
                return None
            position = part[number]
            if self._store.change(version, position, None, Owner.of(self._rank, 0, tasks[position])):
                return Claim(position, self._rank, 0)
        return None

    def left(self, version: int, tasks: int, part: range) -> int:
        """Count the tasks of the queue that nobody runs and nobody has finished."""
        claimed = self._store.count(queue_name(version, part, tasks))
        return max(0, len(part) - claimed) + self.returned(version, tasks)

    def give(self, version: int, claim: Claim, receiver: int) -> bool:
        """Make `receiver` the owner of this rank's task. False when the receiver is lost (the task stays) or this rank
        is no longer the owner (its work would be refused)."""
        owner = self._store.owner(version, claim.position)
        if owner is None or (owner.rank, owner.attempt) != (self._rank, claim.attempt):
            return False
        given = replace(owner, rank=receiver, giver=self._rank)
        if not self._store.change(version, claim.position, owner, given):
            return False
        # A rank is marked as lost before its tasks are gathered: so that gathering sees this gift, or we see the mark.
        lost = receiver in self._store.lost_ranks()
        return not lost or not self._store.change(version, claim.position, given, owner)

    def confirm(self, version: int, position: int, attempt: int) -> Claim | None:
        """Return the claim of a task that was given to this rank; None when somebody else has it since."""
        owner = self._store.owner(version, position)
        if owner is None or (owner.rank, owner.attempt) != (self._rank, attempt):
            return None
        if not self._store.change(version, position, owner, replace(owner, giver=NOBODY)):
            return None
        return Claim(position, self._rank, attempt)

    def release(self, version: int, claim: Claim) -> None:
        """Give up this rank's task, which it will not finish; `collect` offers it again when the rank has left."""
        owner = self._store.owner(version, claim.position)
        if owner is not None and (owner.rank, owner.attempt) == (self._rank, claim.attempt):
            self._store.change(version, claim.position, owner, replace(owner, rank=NOBODY, giver=NOBODY))

    # ---- trainers

    def accepts(self, version: int, claim: Claim) -> bool:
        """Whether a result made under `claim` counts: it is from the task's present owner."""
        owner = self._store.owner(version, claim.position)
        return owner is not None and (owner.rank, owner.attempt) == (claim.rank, claim.attempt)

    def received(self, version: int, position: int) -> None:
        """Note that one more trainer holds a task's result; once a trainer and task."""
        self._store.count(_received(version, position), 1)

    def held_by(self, version: int, position: int, trainers: int) -> bool:
        """Whether so many trainers hold a task's result."""
        return self._store.count(_received(version, position)) >= trainers

    def returned(self, version: int, tasks: int) -> int:
        """Count the tasks of a queue that came back and wait for an owner."""
        return sum(1 for _ in self._waiting(version, tasks))

    def forget(self, version: int) -> None:
        """Remove what is kept of the queue that can no longer matter once `version` is published."""
        old = version - _FORGET_AFTER
        for position in range(self._known(old)):
            self._store.forget(old, position)
        self._store.forget_queue(version - _FORGET_QUEUE_AFTER)

    # ---- whoever notices a loss: who hosts the store

    def collect(self, rank: int) -> list[str]:
        """Offer the tasks again that `rank` let go of, and those given to it since; returns what to call them. It has
        left and is marked as lost. What it finished counts."""
        names: list[str] = []
        newest = self._store.newest_version()
        for version in (newest - 1, newest):
            returned, back = self._store.returned(version), []
            for position in range(self._known(version)):
                owner = self._store.owner(version, position)
                if owner is not None and owner.rank == rank and owner.giver != NOBODY:
                    free = replace(owner, rank=NOBODY, giver=NOBODY)
                    owner = free if self._store.change(version, position, owner, free) else None
                if owner is not None and owner.rank == NOBODY and position not in returned:
                    back.append(position)
                    names.append(_name(owner))
            if back:
                self._store.add_returned(version, back)
        return names

    def lose(self, rank: int, cause: str, trainers: int) -> list[str]:
        """Give back every task that `rank` owned and that not all trainers hold; returns what to call them. The rank
        must be dead and marked as lost.

        Raises:
            ClaimError: a task has lost its last owner.
        """
        names: list[str] = []
        newest = self._store.newest_version()
        for version in (newest - 1, newest):
            back = [
                position
                for position in range(self._known(version))
                if self._take_back(version, position, rank, cause, trainers, names)
            ]
            if back:
                self._store.add_returned(version, back)
        return names

    def _take_back(self, version: int, position: int, rank: int, cause: str, trainers: int, names: list[str]) -> bool:
        """Whether the task at `position` goes back."""
        while True:
            owner = self._store.owner(version, position)
            if owner is None:  # claimed and not noted yet: whoever it is (the dead rank?) will claim anew
                if self._store.change(version, position, None, Owner(NOBODY, 0, NOBODY, -1, -1, -1)):
                    return True
                continue
            if rank not in (owner.rank, owner.giver):
                return False
            if self._store.count(_received(version, position)) >= trainers:
                return False
            name = _name(owner)
            if owner.attempt + 1 >= MAX_ATTEMPTS:
                raise ClaimError(
                    f"{name} lost {owner.attempt + 1} owners, the last being rank {rank}, which {cause}: "
                    "the task itself is the likely cause. Look at its prompt and its reward."
                )
            if self._store.change(version, position, owner, Owner(NOBODY, owner.attempt + 1, NOBODY, *_named(owner))):
                names.append(name)
                return True

    def _waiting(self, version: int, tasks: int) -> Iterator[tuple[int, Owner]]:
        """Yield (position, owner entry) of the tasks that came back and have no owner. Ranks that asked for the last
        task at one moment took the counter past the queue's end."""
        for position in self._store.returned(version):
            owner = self._store.owner(version, position) if position < tasks else None
            if owner is not None and owner.rank == NOBODY:
                yield position, owner

    def _known(self, version: int) -> int:
        """Count the positions of the queue that may have an owner."""
        return self._store.count(f"claim/v{version}")


def queue_name(version: int, part: range, tasks: int) -> str:
    """The counter of a queue, or of one rank's part of a divided one."""
    return f"claim/v{version}" if len(part) == tasks else f"claim/v{version}/{part.start}"


def queue_part(tasks: int, number: int, count: int) -> range:
    """Positions of the `number`-th of `count` equal parts of a divided queue."""
    return range(number * tasks // count, (number + 1) * tasks // count)


def _received(version: int, position: int) -> str:
    """The counter of trainers that hold a result."""
    return f"got/v{version}/{position}"


def _name(owner: Owner) -> str:
    return f"task {owner.index} of step {owner.step} (group {owner.group})"


def _named(owner: Owner) -> Iterable[int]:
    return owner.step, owner.index, owner.group
