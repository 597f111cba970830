"""Claims: who runs which task. A free rank takes the next number of the queue, unless another would finish it earlier.

Invariants:
  one owner: a task is run by one rank at a time, and finished once; a late result of a lost owner is refused;
  a task whose owner died goes back exactly once per loss, with a new attempt id;
  progress: some rank that is free accepts, or some rank that is busy will, so declining never stops the queue;
  makespan: n equal tasks on m ranks of constant speed, all free at 0, end by (1 + (m-1)/n) x total work / total speed.
  Proof of the last: the accepted finishing times are the n smallest of the union of {free_i + j s_i}. At
  t = (n+m-1)/sum(1/s_i) the union holds sum floor(t/s_i) > n-1 of them, so n fit.

Pure: standard library only. The runtime keeps the states of `ClaimBook` in its control store (cluster/claims.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from digenrl.schedule.spec import Task


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


def hands_over(
    remaining: int, step_seconds: float, idle_step_seconds: Sequence[float], move_seconds: float = 0.0
) -> bool:
    """Whether the owner of a task with `remaining` denoising steps gives it to an idle, faster rank at this boundary.

    Only to a rank that finishes strictly earlier, so a task never moves back and forth.
    """
    return any(remaining * idle + move_seconds < remaining * step_seconds for idle in idle_step_seconds)


def yields(own: int, step_seconds: float, running: Sequence[tuple[int, float]]) -> bool:
    """Levelling, nothing waiting: whether a slow rank gives up its task for a faster rank to exchange with its own.

    Args:
        own: remaining steps of the slow rank's task.
        step_seconds: of the slow rank.
        running: (remaining steps, seconds per step) of the tasks that other ranks run.
    """
    return any(seconds < step_seconds and own > left + max(1, left // 3) for left, seconds in running)


def swaps(own: int, waiting: Sequence[int], ranks: int) -> int | None:
    """Levelling of the tail (hand-off, one fragment = the whole batch): which waiting task to run instead of one's own.

    In the tail (at most `ranks` tasks not begun) a rank at a denoising-step boundary changes to the longest of them
    when that is longer than its own by a third: all tasks then end together, and generation ends about one denoising
    step of each rank above total work / total speed. Highest-level-first is optimal for preemptive chains on uniform
    machines (Horvath, Lam, Sethi, "A level algorithm for preemptive scheduling", J. ACM 24 (1977)). The proportional
    threshold keeps the number of moves logarithmic in the steps. Not for pipelined fragments: there the order of groups
    matters, not the makespan.

    Args:
        own: remaining steps of the rank's own task.
        waiting: remaining steps of the tasks that nobody runs, suspended or unclaimed.
        ranks: ranks that generate.

    Returns:
        Position in `waiting`, or None to go on.
    """
    if not waiting or len(waiting) > 2 * ranks:
        return None
    longest = max(range(len(waiting)), key=lambda i: (waiting[i], -i))
    return longest if waiting[longest] > own + own // 3 else None


MAX_ATTEMPTS = 2
"""Owners that a task may lose before it is taken for the cause of their deaths (a poisoned prompt, a broken reward)."""


class ClaimError(RuntimeError):
    """A task kept losing its owners, or a caller broke the claim protocol."""


@dataclass(frozen=True)
class Claim:
    """The right of one rank to run one task. Its lease is the rank's life, as the launcher sees it."""

    position: int
    """Position in the queue (not the task's index within its RL step)."""
    rank: int
    attempt: int
    """0 for the first owner; a hand-over keeps it, a loss adds one."""


def owns(owner: Claim | None, rank: int, attempt: int) -> bool:
    """Whether what `rank` did in `attempt` counts: a lost, handed-over or finished task's former owner is refused."""
    return owner is not None and (owner.rank, owner.attempt) == (rank, attempt)


def next_attempt(claim: Claim, task: str, cause: str, max_attempts: int = MAX_ATTEMPTS) -> int:
    """The attempt id with which a task whose owner was lost goes back.

    Args:
        claim: the lost owner's.
        task: what to call the task in an error.
        cause: of the loss, after "rank 3, which ...".

    Raises:
        ClaimError: `max_attempts` owners are lost.
    """
    if claim.attempt + 1 >= max_attempts:
        raise ClaimError(
            f"{task} lost {claim.attempt + 1} owners, the last being rank {claim.rank}, which {cause}: "
            "the task itself is the likely cause. Look at its prompt and its reward."
        )
    return claim.attempt + 1


@dataclass
class ClaimBook:
    """Claims of one queue (`schedule.queue`): a pure state machine.

    unclaimed -> claimed -> done; claimed -> suspended -> claimed (hand-off); claimed -> lost -> claimed (attempt + 1).
    """

    tasks: tuple[Task, ...]
    max_attempts: int = MAX_ATTEMPTS
    next_position: int = 0
    """The counter of the atomic add."""
    owners: dict[int, Claim] = field(default_factory=dict)
    """position -> present claim."""
    suspended: dict[int, int] = field(default_factory=dict)
    """position -> attempt, of tasks handed back at a denoising-step boundary."""
    lost: dict[int, int] = field(default_factory=dict)
    """position -> next attempt, of tasks whose owner died."""
    finished: set[int] = field(default_factory=set)

    @property
    def unclaimed(self) -> int:
        """Tasks that nobody runs and nobody has finished (suspended ones included)."""
        return len(self.tasks) - self.next_position + len(self.lost) + len(self.suspended)

    @property
    def complete(self) -> bool:
        """Every task of the queue is finished."""
        return len(self.finished) == len(self.tasks)

    def waiting(self) -> list[int]:
        """Positions that nobody runs, in the order in which they are claimed: earliest group first."""
        return sorted([*self.lost, *self.suspended]) + list(range(self.next_position, len(self.tasks)))

    def claim(self, rank: int, position: int | None = None) -> Claim | None:
        """The next task for `rank` (lost and suspended ones precede the counter), or None when nothing waits.

        `position` asks for one suspended, lost or the very next task (levelling of the tail).
        """
        returned = {**self.suspended, **self.lost}
        if position is None:
            position = min(returned) if returned else self.next_position
        if position >= len(self.tasks):
            return None
        if position in returned:
            attempt = returned[position]
            self.suspended.pop(position, None)
            self.lost.pop(position, None)
        elif position == self.next_position:
            attempt = 0
            self.next_position += 1
        else:
            raise ClaimError(f"rank {rank} asked for task {position}, which is not waiting: ask for {self.waiting()}.")
        claim = Claim(position, rank, attempt)
        self.owners[position] = claim
        return claim

    def done(self, position: int, rank: int, attempt: int) -> bool:
        """A result arrived. False = refused: the task was reissued, handed over or finished already."""
        if not owns(self.owners.get(position), rank, attempt):
            return False
        del self.owners[position]
        self.finished.add(position)
        return True

    def suspend(self, claim: Claim) -> bool:
        """The owner hands its task back at a denoising-step boundary. False when it is no longer the owner."""
        if not owns(self.owners.get(claim.position), claim.rank, claim.attempt):
            return False
        del self.owners[claim.position]
        self.suspended[claim.position] = claim.attempt
        return True

    def owner_died(self, rank: int, cause: str = "died") -> list[int]:
        """Take back every task of `rank`; returns their positions. A second notice of the same death returns none.

        Raises ClaimError when a task has lost `max_attempts` owners.
        """
        held = [position for position, claim in sorted(self.owners.items()) if claim.rank == rank]
        for position in held:
            claim, task = self.owners.pop(position), self.tasks[position]
            name = f"task {task.index} of step {task.step} (group {task.group})"
            self.lost[position] = next_attempt(claim, name, cause, self.max_attempts)
        return held
