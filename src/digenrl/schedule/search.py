"""TAG: should idle trainers generate? The bubble-triggered search (BTS).

The state at an idle point of the trainers: when each rollout rank is free, when the trainers are,
the tasks left, and the fragments to train. A branch waits for the next fragment, or first lends k
rounds of tasks. The lower bound is the work that remains. The incumbent is never to lend. Behind
the idle point the search follows fixed rules, so it takes a millisecond.

The model: rollout ranks accept tasks by the decline rule (`ranks.declines_task`). Their finishing
times are then the sorted union of {free_i + j seconds_i}. A loan does not change these times, but
the claims behind it get later numbers. A fragment is ready when its last task is. Fragments train
one after another.

Invariants:
1. Under this model the chosen plan is never worse than never lending.
2. No plan lends while a fragment is ready (I6).
3. Where `may_lend` is false, no plan lends.

Pure: standard library only.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

K_MAX = 4
"""Largest number of rounds that one search lends."""


@dataclass(frozen=True)
class LendingState:
    """Input of the search. Times are seconds from now (0 = the idle point)."""

    rollout_free: tuple[float, ...]
    """End of the present task of each rank that generates (including other lending trainers)."""
    rollout_seconds: tuple[float, ...]
    """Seconds per task on each of these ranks."""
    tasks_left: int
    """Unclaimed tasks of the step."""
    fragment_tasks: tuple[int, ...]
    """Unclaimed tasks of each untrained fragment, in training order; their sum is `tasks_left`."""
    fragment_ready: tuple[float, ...]
    """Per fragment: when its tasks in flight will be done (0 if none is)."""
    train_seconds: tuple[float, ...]
    """Per fragment: seconds of training on the trainers."""
    lend_seconds: float
    """Duration of a round in seconds. Every lender generates one task per round."""
    lenders: int = 1
    """Trainers that lend together now (1 = this rank alone; sharded trainers lend in lock-step)."""
    lenders_later: int = 0
    """Trainers that can lend at the idle points to come; 0 = the same."""
    switch_seconds: float = 0.0
    """Cost of one switch between training and generation; a loan pays two."""
    tasks_later: int = 0
    """Unclaimed tasks of the next step that the version at hand generates (one-step asynchrony).
    They shorten the next step and not this one, so they are worth a loan only where the loan costs
    nothing. Such a loan runs to its end."""
    later_taken: int = 0
    """Claimed tasks of the next step."""
    ahead: bool = False
    """Whether no rollout rank holds the step's version yet, so that a loan now takes the first
    tasks."""
    may_lend: bool = True
    """False where lending is off."""


@dataclass(frozen=True)
class Decision:
    """Answer of the search: lend `lend` rounds now (0 = wait), and the predictions for both
    courses."""

    lend: int
    predicted_step_s: float
    """Seconds from now to the end of the step under the chosen plan."""
    predicted_without: float
    """Seconds from now to the end of the step if nothing is ever lent."""

    @property
    def gain(self) -> float:
        """Predicted seconds saved; never negative."""
        return self.predicted_without - self.predicted_step_s


def accepted_claims(
    free: tuple[float, ...], seconds: tuple[float, ...], tasks: int
) -> tuple[list[float], list[float]]:
    """Return claiming and finishing times of the `tasks` claims that ranks accept, in order of
    claim.

    The accepted finishing times are the `tasks` smallest of the union of {free_i + j seconds_i}
    (see `ranks`).

    Example:
        Ranks of 2 and 3 seconds a task share four. Of two tasks that end at 6, rank 0 has the last:

        >>> accepted_claims(free=(0.0, 0.0), seconds=(2.0, 3.0), tasks=4)
        ([0.0, 0.0, 2.0, 4.0], [2.0, 3.0, 4.0, 6.0])
    """
    begin = [max(0.0, start) for start in free]
    # (finish of the rank's next task, rank, its start): the smallest finish is accepted next.
    heap = [(begin[rank] + cost, rank, begin[rank]) for rank, cost in enumerate(seconds)]
    heapq.heapify(heap)
    claims = []
    for _ in range(tasks if heap else 0):
        finish, rank, start = heap[0]
        claims.append((start, finish))
        heapq.heapreplace(heap, (finish + seconds[rank], rank, finish))
    # Accepted by finish, but numbered by start: tasks get their numbers when they are claimed.
    claims.sort()
    return [start for start, _ in claims], [finish for _, finish in claims]


def after_older(
    free: Sequence[float], seconds: Sequence[float], ready: Sequence[float], older: Sequence[int]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return when rollout ranks are free, and when fragments are ready, after the tasks of the
    previous version.

    With one-step asynchrony the previous version generates some of the step's tasks. Rollout ranks
    claim these first, and no other rank can.

    Args:
        free: end of the present task of each rollout rank.
        seconds: seconds per task on each of them.
        ready: per fragment: when its tasks in flight will be done.
        older: per fragment: its unclaimed tasks of the previous version.
    """
    heap = [
        (max(0.0, start) + cost, rank)
        for rank, (start, cost) in enumerate(zip(free, seconds, strict=True))
    ]
    heapq.heapify(heap)
    # `behind`: when each rank is done with older tasks. `last`: when all older tasks so far are
    # done.
    behind, last, times = list(free), 0.0, []
    for own, tasks in zip(ready, older, strict=True):
        for _ in range(tasks if heap else 0):
            finish, rank = heap[0]
            heapq.heapreplace(heap, (finish + seconds[rank], rank))
            behind[rank], last = finish, max(last, finish)
        times.append(max(own, last) if tasks else own)
    return tuple(behind), tuple(times)


def search_loans(state: LendingState, k_max: int = K_MAX) -> Decision:
    """Choose between waiting and lending k rounds. Behind the idle point the best of three fixed
    policies follows: never lend, lend what fits into a wait, lend what covers it.

    Args:
        state: the idle point.
        k_max: largest number of rounds lent at one idle point.

    Returns:
        The best plan's first move. Of equally good moves: the largest loan that fits into the wait,
            else the smallest. A loan that fits costs nothing and relieves the rollout ranks, even
            if it does not shorten this step.

    Example:
        >>> # One rollout rank has 4 tasks of 4 s left, for two fragments that train 1 s each.
        >>> left = (0.0,), (4.0,), 4, (2, 2), (0.0, 0.0), (1.0, 1.0)
        >>> search_loans(LendingState(*left, lend_seconds=4.0))
        Decision(lend=2, predicted_step_s=10.0, predicted_without=17.0)
        >>> search_loans(LendingState(*left, lend_seconds=20.0)).lend  # too slow to help
        0
    """
    tree = _Search(state, k_max)
    start = _Point(0, 0.0, 0, 0, ())
    without = tree.follow_policy(start, None)
    if not state.may_lend or not state.train_seconds or tree.ready_at(start) <= 0.0:
        return Decision(0, without, without)
    # Only tasks of the next step are left: a loan may fill the wait, but must not delay this step.
    if state.tasks_left == 0:
        rounds = [
            k
            for k in range(1, k_max + 1)
            if (k - 1) * state.lenders < tree.spare_tasks(without) and tree.loan_fits(k)
        ]
        return Decision(max(rounds, default=0), without, without)
    # A first bound, so that branches worse than never lending are cut early.
    tree.best = without
    best_time, best_k = without, 0
    for lend in range(k_max + 1):
        point = tree.lend_rounds(start, lend)
        if point is None:
            continue
        end = tree.explore_point(point, without)
        if end < best_time - 1e-9 or (end <= best_time + 1e-9 and tree.loan_fits(lend)):
            best_time, best_k = min(end, best_time), lend
            tree.best = best_time
    return Decision(best_k, best_time, without)


class _Point(NamedTuple):
    """A node of the search: the trainers are free at `now`, and `fragment` is next."""

    fragment: int
    now: float
    lent: int
    """Tasks lent so far."""
    inside: int
    """Lent tasks of the fragments up to this one, without those in `loans`."""
    loans: tuple[tuple[int, int], ...]
    """Runs of lent task numbers that may reach beyond the fragment: (first number, count)."""


class _Search:
    def __init__(self, state: LendingState, k_max: int) -> None:
        self.state, self.k_max = state, k_max
        self.best = float("inf")
        self._starts, finishes = accepted_claims(
            state.rollout_free, state.rollout_seconds, state.tasks_left
        )
        self._done_by = list(itertools.accumulate(finishes, max))
        """_done_by[j]: when the first j+1 claims of the rollout ranks are all finished."""
        # _needs[i]: tasks of the fragments 0..i. _train_after[i]: seconds to train from fragment i
        # on.
        self._needs = list(itertools.accumulate(state.fragment_tasks))
        self._train_after = list(itertools.accumulate(reversed(state.train_seconds), initial=0.0))[
            ::-1
        ]
        self._later = state.lenders_later or state.lenders
        lenders = max(state.lenders, self._later)
        # Tasks per second if every rank generated all the time.
        self._rate = sum(1.0 / s for s in state.rollout_seconds) + lenders / state.lend_seconds

    def ready_at(self, point: _Point) -> float:
        """Return when the next fragment is complete, given the loans so far (all finished by the
        trainers' present)."""
        need = self._needs[point.fragment]
        own = need - point.inside
        for first, count in point.loans:
            # Of a loan only the tasks numbered below `need` belong to fragments up to this one.
            own -= max(0, min(count, need - first))
        if own <= 0:
            return self.state.fragment_ready[point.fragment]
        if own > len(self._done_by):
            return float("inf")  # nobody generates but the lenders
        return max(self.state.fragment_ready[point.fragment], self._done_by[own - 1])

    def loan_fits(self, rounds: int) -> bool:
        """Return whether a loan of `rounds` now ends before the next fragment is ready."""
        state, wait = self.state, self.ready_at(_Point(0, 0.0, 0, 0, ()))
        # Two switches: the published weights are taken up, and put away again.
        return rounds * state.lend_seconds + 2 * state.switch_seconds <= wait

    def spare_tasks(self, end: float) -> float:
        """Return how many tasks of the next step to lend now, if this step ends at `end`.

        The tasks that rollout ranks leave undone by then are shared by speed. If the trainers did
        all of them, the trainers would have no time to lend in the next step. The rollout ranks
        would have no work before its weights come.
        """
        state = self.state
        times = zip(state.rollout_free, state.rollout_seconds, strict=True)
        # Whole tasks: what a rank has only begun at `end` counts as undone.
        made = sum(max(0.0, end - free) // seconds for free, seconds in times)
        undone = max(0.0, state.tasks_later + state.later_taken - made)
        return undone * state.lenders / state.lend_seconds / self._rate - state.later_taken

    def lend_rounds(self, point: _Point, rounds: int) -> _Point | None:
        """Return the point after lending `rounds` rounds; None when fewer are there to lend."""
        if rounds == 0:
            return point
        state = self.state
        lenders = state.lenders if point.now == 0.0 else self._later
        begin = point.now + state.switch_seconds
        # By then rollout ranks have claimed so many tasks, and earlier loans have taken theirs.
        first = (
            0
            if state.ahead and point.now == 0.0
            else bisect_right(self._starts, begin) + point.lent
        )
        available = state.tasks_left - first
        # The last round would have no task for anybody.
        if available <= (rounds - 1) * lenders:
            return None
        count, end = rounds * lenders, begin + rounds * state.lend_seconds
        count = min(count, available)
        loans = (*point.loans, (first, count)) if count else point.loans
        return _Point(
            point.fragment, end + state.switch_seconds, point.lent + count, point.inside, loans
        )

    def train_fragment(self, point: _Point) -> _Point | None:
        """Return the point after waiting for the next fragment and training it; None when it never
        becomes ready."""
        now = max(point.now, self.ready_at(point)) + self.state.train_seconds[point.fragment]
        return None if now == float("inf") else _Point(point.fragment + 1, now, *point[2:])

    def follow_policy(self, point: _Point, cover: bool | None) -> float:
        """Return the step's end under a fixed policy: never lend (None), lend what fits into waits,
        or what covers them."""
        begin, now, lent, inside, loans = point
        state, done_by, tasks, needs = self.state, self._done_by, len(self._done_by), self._needs
        for fragment in range(begin, len(needs)):
            # As `ready_at` and `train_fragment`, without a point for every fragment: most time is
            # spent here. I6: a ready fragment leaves no wait, so nothing is lent before it is
            # trained.
            need, ready = needs[fragment], state.fragment_ready[fragment]
            own = need - inside
            if loans:
                if loans[0][0] + loans[0][1] <= need:
                    inside += sum(count for first, count in loans if first + count <= need)
                    loans = tuple(loan for loan in loans if loan[0] + loan[1] > need)
                    own = need - inside
                for first, count in loans:
                    own -= max(0, min(count, need - first))
            if own > tasks:
                ready = float("inf")
            elif own > 0 and done_by[own - 1] > ready:
                ready = done_by[own - 1]
            if cover is not None and (wait := ready - now - 2 * state.switch_seconds) > 0:
                fit = self.k_max if wait == float("inf") else int(wait / state.lend_seconds) + cover
                after = self.lend_rounds(
                    _Point(fragment, now, lent, inside, loans), min(self.k_max, fit)
                )
                if after is not None:
                    _, now, lent, inside, loans = after
                    ready = self.ready_at(after)
            now = (ready if ready > now else now) + state.train_seconds[fragment]
            if now + self._train_after[fragment + 1] > self.best + 1e-6:  # no better than another
                return float("inf")
        return now

    def explore_point(self, point: _Point, without: float) -> float:
        """Return the best end of the step after deciding at `point`: train its fragment, then
        follow the best fixed policy. `without` is the end if nothing is ever lent."""
        here = self.train_fragment(point)
        if here is None:
            return float("inf")
        end = self.follow_policy(here, None) if here.lent else without
        # The earliest possible end: trainers never wait again.
        training = here.now + self._train_after[here.fragment]
        if self._lower_bound(here) >= self.best or end <= training + 1e-9:
            return end
        return min(end, self.follow_policy(here, False), self.follow_policy(here, True))

    def _lower_bound(self, point: _Point) -> float:
        """Return a lower bound for the step's end: the trainers' remaining work, and the last task
        if all ranks generate."""
        unclaimed = self.state.tasks_left - bisect_right(self._starts, point.now) - point.lent
        # The last fragment cannot be trained before the last task is there.
        generated = point.now + max(0, unclaimed) / self._rate + self.state.train_seconds[-1]
        return max(point.now + self._train_after[point.fragment], generated)


@dataclass
class LendingMonitor:
    """Compares predictions with what happened, and switches TAG off when its error exceeds its gain
    (I6).

    Call `record_loan` with the first loan of each RL step: the prediction of that loan spans the
    whole step.
    """

    patience: int = 3
    """Loans before the first verdict, and loans that the verdict averages over (EWMA weight
    1/patience)."""
    loans: int = 0
    gain: float = 0.0
    """EWMA of the predicted gain, seconds."""
    error: float = 0.0
    """EWMA of max(0, measured - predicted), seconds. A step faster than predicted is no reason to
    stop."""
    off: bool = False

    def record_loan(self, decision: Decision, measured_step_s: float) -> str | None:
        """Take in how long the step took from the decision on. Return a message when that switches
        lending off."""
        if self.off or decision.lend == 0:
            return None
        self.loans += 1
        weight = max(1.0 / self.patience, 1.0 / self.loans)
        self.gain += weight * (decision.gain - self.gain)
        self.error += weight * (max(0.0, measured_step_s - decision.predicted_step_s) - self.error)
        if self.loans < self.patience or self.error <= self.gain:
            return None
        self.off = True
        return (
            f"schedule.tag switched itself off after {self.loans} loans: steps took "
            f"{self.error:.3f} s longer than "
            f"predicted on average, more than the {self.gain:.3f} s that lending was to save. Run "
            "`make profile` for "
            "this machine's costs, or set schedule.tag=false."
        )
