"""What a rank does, which roles the ranks have, and which rank ends a task first.

Pure: standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Work(NamedTuple):
    """Present activity of a generating rank. Other ranks use it to decide whether to leave a task
    to this rank."""

    version: int = -1
    """Weight version that the rank holds; -1 = none yet."""
    task_seconds: float = 0.0
    """Measured seconds of one whole task; 0 = not measured yet."""
    step: int = -1
    """RL step of the running task."""
    group: int = -1
    """Group of the running task; -1 = the rank runs none."""
    until: float = 0.0
    """Expected end of the running task, seconds on the run's clock."""

    @property
    def busy(self) -> bool:
        """Whether the rank runs a task."""
        return self.group >= 0

    def free_in(self, now: float) -> float:
        """Return the seconds until the rank is free."""
        return max(0.0, self.until - now) if self.busy else 0.0


@dataclass(frozen=True)
class Roles:
    """Roles of the ranks. Ranks 0 .. trainers-1 train, the others are rollout ranks."""

    trainers: int
    rollouts: int
    lockstep: bool = False
    """Whether trainers are sharded. Every forward is then a collective of all trainers, so they
    decide and move together."""
    split: bool = False
    """Whether every queue is divided equally beforehand instead of claimed."""

    @property
    def colocated(self) -> bool:
        """Whether the trainers generate everything themselves."""
        return self.rollouts == 0

    @property
    def generators(self) -> range:
        """Ranks whose role is to claim tasks."""
        return (
            range(self.trainers)
            if self.colocated
            else range(self.trainers, self.trainers + self.rollouts)
        )


def finished_before(free: float, seconds: float, rank: int, time: float, other: int) -> int:
    """Count the tasks that `rank`, free at `free`, finishes before (time, other) in the order of
    (finishing time, rank)."""
    if seconds <= 0 or not math.isfinite(seconds):
        return 0
    # The division may be off by one in floating point; the two loops correct it, so that all ranks
    # agree on ties.
    count = max(0, math.floor((time - free) / seconds))
    while (free + (count + 1) * seconds, rank) < (time, other):
        count += 1
    while count > 0 and (free + count * seconds, rank) >= (time, other):
        count -= 1
    return count


def declines_task(
    rank: int,
    now: float,
    seconds: Mapping[int, float],
    free_at: Mapping[int, float],
    tasks_left: int,
) -> bool:
    """Return whether free `rank` leaves the next task to others: they would finish all `tasks_left`
    before it finished one.

    Args:
        rank: the free rank.
        now: the present.
        seconds: rank -> seconds per task, for every rank that works on the queue (`rank` included).
        free_at: rank -> when its running task ends (absent or past = free now).
        tasks_left: unclaimed tasks of the queue.

    Ties go to the lower rank, so that exactly one of two equal ranks takes the last task.

    Example:
        In the 9 seconds that rank 1 would take, rank 0 finishes four tasks, but not five:

        >>> declines_task(1, now=0.0, seconds={0: 2.0, 1: 9.0}, free_at={}, tasks_left=4)
        True
        >>> declines_task(1, now=0.0, seconds={0: 2.0, 1: 9.0}, free_at={}, tasks_left=5)
        False
    """
    finish = now + seconds[rank]
    others = 0
    for other, cost in seconds.items():
        if other != rank:
            others += finished_before(max(now, free_at.get(other, now)), cost, other, finish, rank)
            if others >= tasks_left:
                return True
    return tasks_left <= 0
