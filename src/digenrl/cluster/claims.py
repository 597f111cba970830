"""Claims at run time: the states of `schedule.claims.ClaimBook`, one key each on the control store, so that one atomic
operation decides every transition and nobody is asked.

    claim/v{version}             the counter: one atomic add takes the next position of the version's queue
    owner/v{version}/{position}  who runs the task, in which attempt; changed by compare-and-set alone
    got/v{version}/{position}    trainers that hold the result
    lost/v{version}              positions that came back because their owner was lost
    work/{rank}                  what a generating rank does now, and how fast it is

A claim's lease is its owner's life: the launcher, which sees a rank die or stand still, kills it first and then gives
its tasks back with a new attempt id. Every result carries the attempt that made it, and trainers refuse any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from digenrl.cluster.control import Control
from digenrl.schedule.claims import Claim, declines, next_attempt, owns
from digenrl.schedule.spec import ScheduleSpec, Task

_NOBODY = -1
_FORGET_AFTER = 2
"""Queues of so many published versions ago have no task left that anybody waits for."""


@dataclass(frozen=True)
class _Owner:
    """The value of an owner key."""

    rank: int
    attempt: int
    giver: int
    """The rank that handed the task over, until the heir confirms; else -1."""
    step: int
    index: int
    group: int

    @property
    def text(self) -> str:
        return ":".join(str(value) for value in astuple(self))

    @classmethod
    def parse(cls, text: str) -> _Owner:
        return cls(*(int(word) for word in text.split(":")))


@dataclass(frozen=True)
class Work:
    """What a generating rank does now; the others decide by it whether to leave a task to this rank."""

    version: int = -1
    """Weights that it holds."""
    task_seconds: float = 0.0
    """Measured seconds of one whole task; 0 = not measured yet."""
    step_seconds: float = 0.0
    """Measured seconds of one denoising step."""
    group: int = -1
    """Group of the task that it runs; -1 = none."""
    until: float = 0.0
    """Run clock at which that task should be done."""

    @property
    def text(self) -> str:
        return ":".join(repr(value) for value in astuple(self))

    @classmethod
    def parse(cls, text: str) -> Work | None:
        """None for a rank that is lost or has not begun."""
        if not text:
            return None
        version, task, step, group, until = text.split(":")
        return cls(int(version), float(task), float(step), int(group), float(until))


class Claims:
    """A rank's way to claim, give, confirm and refuse tasks."""

    def __init__(self, control: Control, rank: int) -> None:
        self._control, self._rank = control, rank

    # ---- generating ranks

    def take(self, version: int, tasks: Sequence[Task], part: range) -> Claim | None:
        """The next task of a queue: one that came back, else the counter's next; None when none is left.

        Args:
            tasks: the version's whole queue.
            part: positions that the counter runs over (all of them, or this rank's own part of a divided queue).
        """
        for position, owner in self._returned(version, len(tasks)):
            task = tasks[position]
            mine = _Owner(self._rank, owner.attempt, _NOBODY, task.step, task.index, task.group)
            if self._change(version, position, owner.text, mine):
                return Claim(position, self._rank, owner.attempt)
        name = queue_name(version, part, len(tasks))
        while self._control.claimed(name) < len(part):
            number = self._control.claim(name)
            if number >= len(part):
                return None
            task = tasks[part[number]]
            mine = _Owner(self._rank, 0, _NOBODY, task.step, task.index, task.group)
            if self._change(version, part[number], "", mine):
                return Claim(part[number], self._rank, 0)
        return None

    def left(self, version: int, tasks: int, part: range) -> int:
        """Tasks of the queue that nobody runs and nobody has finished."""
        claimed = self._control.claimed(queue_name(version, part, tasks))
        return max(0, len(part) - claimed) + sum(1 for _ in self._returned(version, tasks))

    def give(self, version: int, claim: Claim, heir: int) -> bool:
        """Make `heir` the owner of this rank's task; False when the heir is lost (the task stays) or this rank is no
        longer the owner (its work would be refused)."""
        key = _owner_key(version, claim.position)
        text = self._control.get(key) or ""
        owner = _Owner.parse(text) if text else None
        if owner is None or not owns(_claim(claim.position, owner), self._rank, claim.attempt):
            return False
        given = replace(owner, rank=heir, giver=self._rank)
        if not self._change(version, claim.position, text, given):
            return False
        # Marked as lost before its tasks are gathered: so either that gathering sees this gift, or we see the mark.
        return heir not in self._control.lost_ranks() or not self._change(version, claim.position, given.text, owner)

    def confirm(self, version: int, position: int, attempt: int) -> Claim | None:
        """The claim of a task that was handed to this rank; None when it has been given to somebody else since."""
        text = self._control.get(_owner_key(version, position)) or ""
        owner = _Owner.parse(text) if text else None
        if owner is None or not owns(_claim(position, owner), self._rank, attempt):
            return None
        if not self._change(version, position, text, replace(owner, giver=_NOBODY)):
            return None
        return Claim(position, self._rank, attempt)

    def announce(self, work: Work) -> None:
        """Tell the others what this rank does."""
        self._control.set(f"work/{self._rank}", work.text)

    def working(self, ranks: Iterable[int]) -> dict[int, Work]:
        """What each of `ranks` does, of those that have begun and are not lost."""
        ranks = list(ranks)
        found = [Work.parse(text or "") for text in self._control.get_all([f"work/{rank}" for rank in ranks])]
        return {rank: work for rank, work in zip(ranks, found, strict=True) if work is not None}

    # ---- trainers

    def accepts(self, version: int, claim: Claim) -> bool:
        """Whether a result made under `claim` counts: it is from the task's present owner."""
        text = self._control.get(_owner_key(version, claim.position))
        return owns(_claim(claim.position, _Owner.parse(text)) if text else None, claim.rank, claim.attempt)

    def received(self, version: int, position: int) -> None:
        """Note that one more trainer holds a task's result; once a trainer and task."""
        self._control.add(_got_key(version, position), 1)

    def returned(self, version: int, tasks: int) -> int:
        """How many tasks of the version's queue came back and wait for a new owner."""
        return sum(1 for _ in self._returned(version, tasks))

    def published(self, version: int, ranks: Iterable[int] = ()) -> list[int]:
        """Note the newest version, before its weights leave; returns those of `ranks` that are there to get them."""
        self._control.set("version", str(version))
        return self._control.survivors(ranks)

    def forget(self, version: int) -> None:
        """Remove the keys of the queue that can no longer matter once `version` is published."""
        for position in range(self._control.claimed(f"v{version - _FORGET_AFTER}")):
            self._control.delete(_owner_key(version - _FORGET_AFTER, position))
            self._control.delete(_got_key(version - _FORGET_AFTER, position))

    # ---- launcher

    def lose(self, rank: int, cause: str, trainers: int) -> list[str]:
        """Give back every task that `rank` owned and that not all trainers hold; returns what to call them.

        The rank must be dead, and marked with `Control.lose`.

        Raises:
            ClaimError: a task has lost its last owner.
        """
        names: list[str] = []
        newest = int(self._control.get("version") or 0)
        for version in (newest - 1, newest):
            back = [
                f"{position}"
                for position in range(self._control.claimed(f"v{version}"))
                if self._take_back(version, position, rank, cause, trainers, names)
            ]
            if back:
                key = f"lost/v{version}"
                self._control.set(key, " ".join([*(self._control.get(key) or "").split(), *back]))
        return names

    def _take_back(self, version: int, position: int, rank: int, cause: str, trainers: int, names: list[str]) -> bool:
        """Whether the task at `position` goes back."""
        while True:
            text = self._control.get(_owner_key(version, position))
            if text is None:  # claimed and not noted yet: whoever it is (the dead rank?) will claim anew
                if self._change(version, position, "", _Owner(_NOBODY, 0, _NOBODY, -1, -1, -1)):
                    return True
                continue
            owner = _Owner.parse(text)
            if rank not in (owner.rank, owner.giver):
                return False
            if self._control.add(_got_key(version, position), 0) >= trainers:
                return False
            name = f"task {owner.index} of step {owner.step} (group {owner.group})"
            attempt = next_attempt(Claim(position, rank, owner.attempt), name, cause)
            if self._change(version, position, text, replace(owner, rank=_NOBODY, giver=_NOBODY, attempt=attempt)):
                names.append(name)
                return True

    # ---- keys

    def _returned(self, version: int, tasks: int) -> Iterable[tuple[int, _Owner]]:
        """(position, owner key's value) of the tasks that came back and wait."""
        for word in sorted(set((self._control.get(f"lost/v{version}") or "").split()), key=int):
            position = int(word)
            text = self._control.get(_owner_key(version, position)) if position < tasks else None
            if text and _Owner.parse(text).rank == _NOBODY:
                yield position, _Owner.parse(text)

    def _change(self, version: int, position: int, old: str, new: _Owner) -> bool:
        """Set an owner key to `new` if it still is `old`; the two never have the same text."""
        return self._control.compare_set(_owner_key(version, position), old, new.text)


def left_to_others(
    spec: ScheduleSpec, rank: int, version: int, now: float, work: Mapping[int, Work], tasks_left: int
) -> bool:
    """Whether free `rank` declines: those who hold `version` or come to it would finish all `tasks_left` before it
    finished one (with hand-off a task may be taken over at any step, so the question is about steps).

    A rank without a measured speed counts as one that never finishes, so nobody waits for it.
    """
    able = {r: w for r, w in work.items() if w.version <= version or r == rank}
    if spec.handoff:
        seconds = {r: w.step_seconds or math.inf for r, w in able.items()}
        tasks_left *= spec.denoise_steps
    else:
        seconds = {r: w.task_seconds or math.inf for r, w in able.items()}
    if not math.isfinite(seconds.get(rank, math.inf)):
        return False
    busy = {r: w.until for r, w in able.items() if w.group >= 0 and r != rank}
    return declines(rank, now, seconds, busy, tasks_left)


def queue_name(version: int, part: range, tasks: int) -> str:
    """The counter of a queue, or of one rank's part of a divided one."""
    return f"v{version}" if len(part) == tasks else f"v{version}/{part.start}"


def _owner_key(version: int, position: int) -> str:
    return f"owner/v{version}/{position}"


def _got_key(version: int, position: int) -> str:
    return f"got/v{version}/{position}"


def _claim(position: int, owner: _Owner) -> Claim:
    return Claim(position, owner.rank, owner.attempt)
