"""TAG: should idle trainers generate? The bubble-triggered search (BTS), its monitor, and the costs it works with.

State at an idle point of the trainers: when each rollout rank is free, when the trainers are, tasks left, fragments to
train. Branch: wait for the next fragment, or lend k rounds of tasks first. Bound below by the work that remains;
incumbent = never lend; memoised on quantised time; a budget of nodes keeps it to a few milliseconds.

Model: rollout ranks accept tasks by the decline rule (`claims.declines`), so that their finishing times are the sorted
union of {free_i + j seconds_i}, which lending does not change: it only renumbers the claims behind it. A fragment is
ready when its last task is; fragments train one after another.

Invariants: the chosen plan is never worse than never lending under this model; no plan lends while a fragment is ready
(I6); an open gradient transaction after the first optimizer step of a batch forbids lending unless a copy is kept.
Pure: standard library only.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LendingState:
    """What the search sees. Times are seconds from now (0 = the idle point)."""

    rollout_free: tuple[float, ...]
    """When each rank that generates (another lending trainer included) ends its present task."""
    rollout_seconds: tuple[float, ...]
    """Seconds per task of each of them."""
    tasks_left: int
    """Unclaimed tasks of the step."""
    fragment_tasks: tuple[int, ...]
    """Unclaimed tasks of each untrained fragment, in training order; their sum is `tasks_left`."""
    fragment_ready: tuple[float, ...]
    """Per fragment: when its tasks in flight will be done (0 if none is)."""
    train_seconds: tuple[float, ...]
    """Per fragment: seconds of training on the trainers."""
    lend_seconds: float
    """Seconds of one round: every lender generates one task."""
    lenders: int = 1
    """Trainers that lend together (1 = this rank alone; sharded trainers lend in lock-step)."""
    switch_seconds: float = 0.0
    """Cost of one switch between training and generation; a loan pays two."""
    step_seconds: float | None = None
    """With hand-off: one denoising step, after which a loan can be interrupted. None = a loan runs to its end."""
    may_lend: bool = True
    """False after the first optimizer step of a batch when no copy of the published weights is kept (I6)."""


@dataclass(frozen=True)
class Decision:
    """Lend `lend` rounds now (0 = wait), and what the model expects of either course."""

    lend: int
    predicted_step_s: float
    """Seconds from now to the end of the step under the chosen plan."""
    predicted_without: float
    """... when nothing is ever lent."""
    nodes: int
    """Nodes that the search opened."""

    @property
    def gain(self) -> float:
        """Predicted seconds saved; never negative."""
        return self.predicted_without - self.predicted_step_s


def accepted(free: tuple[float, ...], seconds: tuple[float, ...], tasks: int) -> tuple[list[float], list[float]]:
    """Claiming and finishing times of the `tasks` claims that ranks accept, in order of claim.

    The accepted finishing times are the `tasks` smallest of the union of {free_i + j seconds_i} (see `claims`).
    """
    begin = [max(0.0, start) for start in free]
    heap = [(begin[rank] + cost, rank, begin[rank]) for rank, cost in enumerate(seconds)]
    heapq.heapify(heap)
    claims = []
    for _ in range(tasks if heap else 0):
        finish, rank, start = heap[0]
        claims.append((start, finish))
        heapq.heapreplace(heap, (finish + seconds[rank], rank, finish))
    claims.sort()
    return [start for start, _ in claims], [finish for _, finish in claims]


def search(state: LendingState, k_max: int = 4, max_nodes: int = 400) -> Decision:
    """Branch and bound over "wait or lend k rounds" at every idle point that the model foresees.

    Args:
        state: the idle point.
        k_max: largest number of rounds lent at one idle point.
        max_nodes: nodes opened at most; beyond it a branch is closed with "never lend again", a plan like any other.

    Returns:
        The best plan's first move. Ties prefer waiting, then the smaller loan.
    """
    tree = _Search(state, k_max, max_nodes)
    without = tree.never(0, 0.0, 0, ())
    if not state.may_lend or state.tasks_left == 0 or not state.train_seconds or tree.ready(0, 0, ()) <= 0.0:
        return Decision(0, without, without, tree.nodes)
    tree.best = without
    best_time, best_k = without, 0
    for lend in range(0, k_max + 1):
        end = tree.after(0, 0.0, 0, (), lend)
        if end is not None and end < best_time - 1e-9:
            best_time, best_k = end, lend
            tree.best = end
    return Decision(best_k, best_time, without, tree.nodes)


_Loans = tuple[tuple[int, int], ...]
"""Runs of lent task numbers: (first number, count)."""


@dataclass
class _Search:
    state: LendingState
    k_max: int
    max_nodes: int
    nodes: int = 0
    best: float = float("inf")
    memo: dict[tuple[int, int, _Loans], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        state = self.state
        self.starts, finishes = accepted(state.rollout_free, state.rollout_seconds, state.tasks_left)
        self.done_by: list[float] = []
        """done_by[j]: when the first j+1 claims of the rollout ranks are all finished."""
        for finish in finishes:
            self.done_by.append(max(finish, self.done_by[-1]) if self.done_by else finish)
        total, self.needs = 0, []
        for tasks in state.fragment_tasks:
            total += tasks
            self.needs.append(total)
        self.train_after = [0.0] * (len(state.train_seconds) + 1)
        for i in reversed(range(len(state.train_seconds))):
            self.train_after[i] = self.train_after[i + 1] + state.train_seconds[i]
        self.quantum = max(1e-9, (min(state.train_seconds, default=1.0)) / 8)

    def ready(self, fragment: int, lent: int, loans: _Loans) -> float:
        """When `fragment` is complete, given the loans so far (all of them finished by the trainers' present)."""
        need = self.needs[fragment]
        inside = sum(max(0, min(count, need - first)) for first, count in loans)
        own = need - inside
        if own <= 0:
            claims = 0.0
        elif own > len(self.done_by):
            claims = float("inf")  # nobody generates but the lenders
        else:
            claims = self.done_by[own - 1]
        return max(self.state.fragment_ready[fragment], claims)

    def never(self, fragment: int, now: float, lent: int, loans: _Loans) -> float:
        """End of the step when nothing more is lent."""
        for i in range(fragment, len(self.needs)):
            now = max(now, self.ready(i, lent, loans)) + self.state.train_seconds[i]
        return now

    def after(self, fragment: int, now: float, lent: int, loans: _Loans, lend: int) -> float | None:
        """Best end of the step after lending `lend` rounds at `now`; None when that many are not there to lend."""
        state = self.state
        ready = self.ready(fragment, lent, loans)
        if lend:
            claimed = self._claimed(now + state.switch_seconds)
            first = claimed + lent
            available = state.tasks_left - first
            if available <= (lend - 1) * state.lenders:
                return None
            full = now + 2 * state.switch_seconds + lend * state.lend_seconds
            if state.step_seconds is not None and ready < full:  # interrupted at the boundary after `ready`
                stop = max(now + state.switch_seconds, ready) + state.step_seconds
                rounds = int((stop - now - state.switch_seconds) / state.lend_seconds)
                full = min(full, stop + state.switch_seconds)
                lend = min(lend, rounds)
            count = min(lend * state.lenders, available)
            now, lent = full, lent + count
            loans = (*loans, (first, count)) if count else loans
            ready = self.ready(fragment, lent, loans)
        if ready == float("inf"):
            return None
        return self._train(fragment, max(now, ready) + state.train_seconds[fragment], lent, loans)

    def _train(self, fragment: int, now: float, lent: int, loans: _Loans) -> float:
        """Best end of the step, `fragment` having just been trained."""
        following = fragment + 1
        while following < len(self.needs) and self.ready(following, lent, loans) <= now:
            now += self.state.train_seconds[following]  # I6: a ready fragment is trained before anything is lent
            following += 1
        if following == len(self.needs):
            return now
        if self._least(following, now, lent, loans) >= self.best:
            return self.never(following, now, lent, loans)
        key = (following, round(now / self.quantum), loans)
        if key in self.memo:
            return now + self.memo[key]
        self.nodes += 1
        end = self.never(following, now, lent, loans)
        if self.nodes < self.max_nodes:
            for lend in range(0, self.k_max + 1):
                tried = self.after(following, now, lent, loans, lend)
                if tried is not None and tried < end:
                    end = tried
        self.memo[key] = end - now
        return end

    def _least(self, fragment: int, now: float, lent: int, loans: _Loans) -> float:
        """Lower bound: the trainers' remaining work, and the last task at the rate of everybody generating."""
        last = len(self.needs) - 1
        remaining = self.state.tasks_left - self._claimed(now) - lent
        rate = sum(1.0 / s for s in self.state.rollout_seconds) + self.state.lenders / self.state.lend_seconds
        return max(now + self.train_after[fragment], now + max(0, remaining) / rate + self.state.train_seconds[last])

    def _claimed(self, now: float) -> int:
        """Claims that the rollout ranks have made by `now`."""
        low, high = 0, len(self.starts)
        while low < high:
            middle = (low + high) // 2
            if self.starts[middle] <= now:
                low = middle + 1
            else:
                high = middle
        return low


@dataclass
class Cost:
    """Exponentially weighted mean and spread of a measured duration, seeded by the hardware profile."""

    seconds: float
    weight: float = 0.2
    """Of a new measurement."""
    spread: float = 0.0
    """Exponentially weighted mean absolute deviation."""
    count: int = 0

    def update(self, measured: float) -> None:
        """Take a measurement in. The first replaces the seed: a profile's figure is a guess, a span is not."""
        if not measured >= 0.0:
            raise ValueError(f"measured duration = {measured}: give seconds >= 0.")
        if self.count == 0:
            self.seconds = measured
        else:
            self.spread += self.weight * (abs(measured - self.seconds) - self.spread)
            self.seconds += self.weight * (measured - self.seconds)
        self.count += 1


class Costs:
    """Durations by (stage, rank): `Cost` per key, seeded on first use."""

    def __init__(self, seeds: dict[str, float], weight: float = 0.2) -> None:
        self.seeds = dict(seeds)
        self.weight = weight
        self.table: dict[tuple[str, int], Cost] = {}

    def get(self, stage: str, rank: int) -> float:
        """Expected seconds. Raises KeyError naming the stages known when `stage` has neither seed nor measurement."""
        if (stage, rank) in self.table:
            return self.table[stage, rank].seconds
        if stage not in self.seeds:
            raise KeyError(f"no cost of stage {stage!r}: seed one of {', '.join(sorted(self.seeds))} or measure it.")
        return self.seeds[stage]

    def update(self, stage: str, rank: int, measured: float) -> None:
        """Take in one span's seconds."""
        if (stage, rank) not in self.table:
            self.table[stage, rank] = Cost(self.seeds.get(stage, measured), self.weight)
        self.table[stage, rank].update(measured)


@dataclass
class LendingMonitor:
    """Compares predictions with what happened; switches TAG off when its error exceeds its gain (I6)."""

    patience: int = 3
    """Loans seen before a verdict, and loans that the verdict averages over (EWMA weight 1/patience)."""
    loans: int = 0
    gain: float = 0.0
    """EWMA of the predicted gain, seconds."""
    error: float = 0.0
    """EWMA of max(0, measured - predicted), seconds: being faster than predicted is no reason to stop."""
    off: bool = False

    def record(self, decision: Decision, measured_step_s: float) -> str | None:
        """Take in how long the step took from the decision on; returns a message when that switches lending off."""
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
            f"schedule.tag switched itself off after {self.loans} loans: steps took {self.error:.3f} s longer than "
            f"predicted on average, more than the {self.gain:.3f} s that lending was to save. Run `make profile` for "
            "this machine's costs, or set schedule.tag=false."
        )
