"""What a rank does, who takes part, and which rank ends a task first.

Pure: standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Work:
    """What a generating rank does now; the others decide by it whether to leave a task to this rank."""

    version: int = -1
    """Weights that it holds; -1 = none yet."""
    task_seconds: float = 0.0
    """Measured seconds of one whole task; 0 = not measured yet."""
    step: int = -1
    """RL step of the task that it runs."""
    group: int = -1
    """Group of the task that it runs; -1 = none."""
    until: float = 0.0
    """When that task should be done, seconds on the run's clock."""
    waiting: float = 0.0
    """Seconds of the suspended tasks that were given to this rank and that it has not begun."""

    @property
    def values(self) -> tuple[Any, ...]:
        """Its fields, in order."""
        return tuple(vars(self).values())

    @property
    def busy(self) -> bool:
        """Whether it runs a task."""
        return self.group >= 0

    def free_in(self, now: float) -> float:
        """Seconds until it is free."""
        return max(0.0, self.until - now) if self.busy else 0.0


@dataclass(frozen=True)
class Roles:
    """Who takes part. Ranks 0 .. trainers-1 train, the others are rollout ranks."""

    trainers: int
    rollouts: int
    lockstep: bool = False
    """Sharded trainers: every forward is a collective of all of them, so that they decide and move together."""
    split: bool = False
    """Every queue is divided equally beforehand instead of claimed."""
    keeps_copy: bool = False
    """Trainers keep a copy of the published weights, and may lend after the first update of a batch."""

    @property
    def colocated(self) -> bool:
        """The trainers generate everything themselves."""
        return self.rollouts == 0

    @property
    def generators(self) -> range:
        """Ranks that claim tasks by trade."""
        return range(self.trainers) if self.colocated else range(self.trainers, self.trainers + self.rollouts)


def finished_before(free: float, seconds: float, rank: int, time: float, other: int) -> int:
    """Tasks that `rank`, free at `free`, finishes before (time, other) in the order of (finishing time, rank)."""
    if seconds <= 0 or not math.isfinite(seconds):
        return 0
    count = max(0, math.floor((time - free) / seconds))
    while (free + (count + 1) * seconds, rank) < (time, other):
        count += 1
    while count > 0 and (free + count * seconds, rank) >= (time, other):
        count -= 1
    return count


def declines(
    rank: int, now: float, seconds: Mapping[int, float], free_at: Mapping[int, float], tasks_left: int
) -> bool:
    """Whether free `rank` leaves the next task to others: they would finish all `tasks_left` before it finished one.

    Args:
        rank: the free rank.
        now: the present.
        seconds: rank -> seconds per task, every rank that works on the queue (`rank` included).
        free_at: rank -> when it ends what it runs (absent or past = free now).
        tasks_left: unclaimed tasks of the queue.

    Ties go to the lower rank, so that exactly one of two equal ranks takes the last task.
    """
    finish = now + seconds[rank]
    others = 0
    for other, cost in seconds.items():
        if other != rank:
            others += finished_before(max(now, free_at.get(other, now)), cost, other, finish, rank)
            if others >= tasks_left:
                return True
    return tasks_left <= 0
