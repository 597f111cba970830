"""The scheduler: which rank claims, declines, lends, and continues the task of a rank that leaves (I13).

No rank commands the others. Each rank has a scheduler of its own. The rank reports what it sees
(events), asks the scheduler (decisions), and acts. A decision depends only on its arguments and on the
events before it. The simulator reports what all ranks see to one scheduler, and has no rule of its
own. With `record` set, every event and every decision is recorded, so that each decision can be
made again (tests/schedule/replaying.py does).

    events      saw_rank   a rank is free, busy, waiting, lost, or has joined
                expected   a duration of a task, a cell or a switch, from the hardware profile
                measured   a measured duration of the same
                step_begun
    decisions   takes          a free rank claims the next task, or leaves it to a rank that ends it earlier
                next_move      a trainer trains a ready fragment, lends itself, or waits
                opens          how many tasks at the head of a version's queue trainers generate (TAG)
                lend           how many rounds of tasks an idle trainer generates (TAG)
                first_free     the rollout rank that will be free first
                successor      the rank that continues the task of a rank that leaves
                step_ended     whether TAG switches itself off

Invariants:
1. Progress: some free rank accepts the next task, or some busy rank will. Declining never stops the
   queue.
2. Makespan: n equal tasks on m ranks of constant speed, all free at 0, end by (1 + (m-1)/n) x total
   work / total speed. Proof: the accepted finishing times are the n smallest of the union of
   {free_i + j s_i}. At t = (n+m-1)/sum(1/s_i) the union holds sum floor(t/s_i) > n-1 of them, so n
   fit.
3. I6: nothing is lent while a fragment is ready, nor with weights that are not the published ones.

Pure: standard library only.
"""  # noqa: E501

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar, cast

from digenrl.schedule.ranks import Roles, Work, declines_task
from digenrl.schedule.search import (
    Decision,
    LendingMonitor,
    LendingState,
    after_older,
    search_loans,
)
from digenrl.schedule.spec import ScheduleSpec, Task
from digenrl.schedule.timesteps import cells_by_rank

Fragment = tuple[int, ...]
Record = Callable[[dict[str, Any]], None]
"""Receives rows {"event" or "decision": name, "args": [...], "answer": ...} with JSON values
only."""

TRAIN, LEND, WAIT, ASK = "train", "lend", "wait", "ask"
"""Moves of a trainer. ASK means: ask the search first."""
_COST_WEIGHT = 0.2
"""Weight of a new measurement in the running mean of a cost."""


@dataclass
class _Trainer:
    """State that the scheduler keeps for one trainer."""

    loan: int = 0
    """Rounds of the present loan that are still to be generated."""
    asked: tuple[int, int] | None = None
    """(complete groups, tasks left) at the last search. The search gives the same answer until one
    of the two changes."""
    prediction: tuple[Decision, float] | None = None
    """First loan of the step, and when it was granted. The prediction for this loan spans the whole
    step."""
    opened: tuple[Decision, float] | None = None
    """The same of the step to come, if its first tasks are for the trainers (`opens`)."""
    monitor: LendingMonitor = field(default_factory=LendingMonitor)


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _recorded_as(kind: str) -> Callable[[_Method], _Method]:
    """Make a decorator that records each call of a method, and for decisions also the answer."""

    def wrap(method: _Method) -> _Method:
        @functools.wraps(method)
        def call_and_record(self: Scheduler, *args: Any) -> Any:
            answer = method(self, *args)
            if self.record is not None:
                row: dict[str, Any] = {
                    kind: method.__name__,
                    "args": [_json_value(value) for value in args],
                }
                self.record(row | ({"answer": answer} if kind == "decision" else {}))
            return answer

        return cast(_Method, call_and_record)

    return wrap


class Scheduler:
    """One state machine for every decision of a schedule.

    Args:
        spec: the schedule.
        roles: which ranks train and which generate.
        plan: version -> the tasks that ranks with this version generate, in claim order
            (`order.version_queue`, or an override of it).
        record: called with every event and decision.
    """

    def __init__(
        self,
        spec: ScheduleSpec,
        roles: Roles,
        plan: Callable[[int], Sequence[Task]],
        record: Record | None = None,
    ) -> None:
        self.spec, self.roles, self.record = spec, roles, record
        self.cells = functools.cache(
            functools.partial(cells_by_rank, spec, roles.trainers, roles.lockstep)
        )
        """Fragment -> cells of each trainer."""
        self._plan = plan
        self._ranks: dict[int, Work] = {}
        self._costs: dict[tuple[str, int], float] = {}
        """(stage, rank) -> running mean of its seconds."""
        self._guessed: set[tuple[str, int]] = set()
        """Costs that no rank has measured yet."""
        self._trainers: dict[int, _Trainer] = {rank: _Trainer() for rank in range(roles.trainers)}
        self._same_moment: tuple[tuple[Any, ...], Decision, bool] | None = None
        """(moment, the search's answer, whether the answer is about tasks of the step in
        progress)."""
        self._generators = set(roles.generators)
        """Ranks whose role is to generate: the first ones, and the joined ranks that are still
        there."""
        self._timed: set[int] = set()
        """Ranks of `_generators` whose speed is known."""
        self._fastest = math.inf
        """Fewest seconds per task of any rank so far."""

    # ---- events

    def saw_rank(self, rank: int, work: Work | None) -> None:
        """Take in what `rank` does now; None for a rank that is lost or has not begun."""
        # Ranks are polled far more often than they change; a record holds the changes alone.
        if self._ranks.get(rank) == work:
            return
        if self.record is not None:
            self.record(
                {"event": "saw_rank", "args": [rank, None if work is None else _json_value(work)]}
            )
        joined = rank >= self.roles.trainers + self.roles.rollouts
        if work is None:
            self._ranks.pop(rank, None)
            for trainer in self._trainers.values():
                trainer.asked = None  # others may have to do its tasks
            if joined:
                self._generators.discard(rank)
        else:
            self._ranks[rank] = work
            if joined:
                self._generators.add(rank)
                if (
                    work.task_seconds and ("generate", rank) not in self._costs
                ):  # what its pool lets expect
                    self._costs["generate", rank] = work.task_seconds
                    self._guessed.add(("generate", rank))
            if work.task_seconds and rank in self._generators:
                self._timed.add(rank)
            if 0.0 < work.task_seconds < self._fastest:
                self._fastest = work.task_seconds

    @_recorded_as("event")
    def expected(self, stage: str, rank: int, seconds: float) -> None:
        """Take in a duration from the hardware profile. The first measurement replaces it.
        `measured` lists the stages."""
        self._costs[stage, rank] = seconds
        self._guessed.add((stage, rank))

    @_recorded_as("event")
    def measured(self, stage: str, rank: int, seconds: float) -> None:
        """Take in a measured duration.

        Args:
            stage: "generate" (one task), "train" (one forward and backward of one task's cell) or
                "switch" (between training and generation, one way).
        """
        if not seconds >= 0.0:
            raise ValueError(f"measured duration = {seconds}: give seconds >= 0.")
        key = stage, rank
        # A measurement replaces a guess entirely: a wrong profile must not linger in the mean.
        known = seconds if key in self._guessed else self._costs.get(key, seconds)
        self._guessed.discard(key)
        self._costs[key] = known + _COST_WEIGHT * (seconds - known)

    @_recorded_as("event")
    def step_begun(self, rank: int) -> None:
        """Take in that an RL step begins on trainer `rank`."""
        trainer = self._trainers[rank]
        trainer.loan, trainer.asked = 0, None
        trainer.prediction, trainer.opened = trainer.opened, None

    @_recorded_as("decision")
    def step_ended(self, rank: int, now: float) -> str | None:
        """Compare the step's first loan with what happened, now that the step's weights are
        published.

        Return a message when that switches lending off.
        """
        trainer = self._trainers[rank]
        if trainer.prediction is None:
            return None
        decision, at = trainer.prediction
        return trainer.monitor.record_loan(decision, now - at)

    # ---- generating ranks

    @_recorded_as("decision")
    def takes(self, rank: int, version: int, left: int, now: float, head: int = 0) -> bool:
        """Return whether free `rank` claims the next task of the version's queue. If not, ranks
        that hold `version`, or will hold it, end all `left` tasks before this rank would end one.

        A rank whose speed is unknown counts as one that never ends, so no rank waits for it.
        Colocated ranks leave tasks to others only where all is generated before anything is
        trained. In any other schedule it is unknown when the others are free.

        Args:
            left: unclaimed tasks of the queue.
            head: those in the queue's head. Lending trainers go on with these, so they count among
                the other ranks where nothing else is left.
        """
        if left == 0 or self.roles.split:
            return left > 0
        if rank < self.roles.trainers and (self.spec.gap or self.roles.lockstep):
            return True
        # Of a rank of unknown speed nobody can say what the others end before.
        if (left > head or self._task_seconds(rank) == math.inf) and self.many_left(rank, left):
            return True
        seconds, busy = {rank: self._task_seconds(rank)}, {}
        finish = now + seconds[rank]
        trainers = range(self.roles.trainers if left == head else 0)
        lenders = [other for other in trainers if other in self._ranks and self._ranks[other].busy]
        for other in (*lenders, *self._generators):
            work = self._ranks.get(other)
            if other == rank or work is None or work.version > version:
                continue
            free = work.until if work.group >= 0 and work.until > now else now
            if free + work.task_seconds <= finish:  # the others end no task before
                seconds[other], busy[other] = work.task_seconds or math.inf, free
        return not declines_task(rank, now, seconds, busy, left)

    def many_left(self, rank: int, left: int) -> bool:
        """Return whether so many tasks are left that free `rank` takes one, whatever the other
        ranks do now.

        Each other rank ends at most 1 + own / fastest tasks before this rank ends one. The speed of
        every other rank has to be known.
        """
        own = self._task_seconds(rank)
        if own == math.inf:
            return True
        # The bound needs everybody's speed: an unmeasured rank may be faster than the fastest
        # known.
        many = left > len(self._generators) * (1 + own / self._fastest)
        return many and self._generators <= self._timed

    def _task_seconds(self, rank: int) -> float:
        """Return the measured seconds of a task on `rank`; inf if none was measured."""
        work = self._ranks.get(rank)
        return (work.task_seconds if work is not None else 0.0) or math.inf

    @_recorded_as("decision")
    def first_free(self, now: float) -> int | None:
        """Return the rollout rank that is expected to be free first; None if no speed is known."""
        working = self._known_speed(self._generators)
        return min(working, key=lambda rank: (working[rank].free_in(now), rank), default=None)

    @_recorded_as("decision")
    def successor(self, rank: int, version: int, task_step: int, now: float) -> int | None:
        """Return the rank that continues the task of `rank`, which is leaving: the first free
        rollout rank with `version`.

        None if there is no such rank, and for a task of a later step. Only the version of the step
        in progress is sure to be held until its tasks are trained.
        """
        others = [
            (work.free_in(now), other)
            for other, work in self._ranks.items()
            if other >= self.roles.trainers
            and other != rank
            and work.version == version == task_step
        ]
        return min(others, default=(0.0, None))[1]

    # ---- trainers

    def may_lend(self, updates_done: int) -> bool:
        """Return whether a trainer may generate.

        It must hold the published version (I6). Trainers that lend keep a copy of it; colocated
        ones have it until the first update of a batch.
        """
        return updates_done == 0 if self.roles.colocated else self.spec.tag

    def must_generate(self, updates_done: int, pending: int, left: int) -> bool:
        """Return whether colocated ranks generate the rest of a batch before they train the last
        fragment of an update.

        The optimizer step after that fragment changes the weights that the `left` tasks need.
        """
        return (
            self.roles.colocated
            and updates_done < self.spec.updates_per_batch - 1
            and pending == 1
            and left > 0
        )

    @_recorded_as("decision")
    def next_move(
        self,
        rank: int,
        updates_done: int,
        pending: Sequence[Fragment],
        ready: Fragment | None,
        completed: int,
        left: int,
        granted: int | None = None,
    ) -> str:
        """Return a free trainer's next move: TRAIN the `ready` fragment, LEND itself for one round,
        WAIT, or ASK the search.

        After ASK the caller asks the search (`lend`, or an override of it), and calls again with
        its answer as `granted`. The search is asked once per finished or claimed task, and after a
        loss. In between its answer cannot change.

        Args:
            updates_done: optimizer updates done within the step in progress.
            pending: fragments of the update that this trainer has still to train.
            ready: the fragment of `pending` to train now, if it is complete.
            completed: complete groups of the step.
            left: unclaimed tasks of the version's queue.
            granted: rounds that the search has just granted.
        """
        trainer = self._trainers[rank]
        if ready is not None and not self.must_generate(updates_done, len(pending), left):
            trainer.loan = 0
            return TRAIN
        if left == 0 or not self.may_lend(updates_done):
            trainer.loan = 0
            return WAIT
        if trainer.loan == 0:
            if granted is None:
                # Colocated ranks answer by the decline rule, which also depends on the time.
                unchanged = trainer.asked == (completed, left) and not self.roles.colocated
                return WAIT if unchanged else ASK
            trainer.asked, trainer.loan = (completed, left), granted
        if trainer.loan == 0:
            return WAIT
        trainer.loan -= 1
        return LEND

    @_recorded_as("decision")
    def opens(
        self, rank: int, step: int, pending: Sequence[Fragment], left: Sequence[int], now: float
    ) -> int:
        """Return how many tasks at the head of the queue of version `step` the trainers generate.

        Trainer 0 asks before it sends the version. The trainers are idle then, and the step's first
        fragment waits for its slowest task. Where the search finds that the step ends sooner if
        trainers begin with this fragment, rollouts claim behind it. Arguments as for `lend`.
        """
        if self._cannot_judge_loan(rank) or self.roles.colocated:
            return 0
        rollouts = self._known_speed(sorted(self._generators))
        state = self._lending_state(
            rank, rollouts, {}, step, pending, left, now, self.roles.trainers
        )
        decision = search_loans(state)
        head = min(decision.lend * state.lenders, state.tasks_left)
        self._trainers[rank].opened = (decision, now) if head else None
        return head

    def _cannot_judge_loan(self, rank: int) -> bool:
        """Return whether trainer `rank` cannot tell what a loan is worth, or may not lend."""
        known = ("train", rank) in self._costs and any(map(self._has_speed, self._generators))
        return not known or self._trainers[rank].monitor.off

    @_recorded_as("decision")
    def lend(
        self,
        rank: int,
        step: int,
        pending: Sequence[Fragment],
        left: Sequence[int],
        now: float,
        head: int = 0,
    ) -> int:
        """Return how many rounds of tasks idle trainer `rank` generates now; 0 = wait.

        Colocated ranks wait for nobody: they take one task at a time, unless another rank ends it
        earlier. Trainers beside rollout ranks ask the search, once all costs that the search needs
        have been measured. Trainers that are idle at the same moment get the same answer.

        Args:
            step: RL step in progress, and the version that the trainer generates with.
            pending: untrained fragments of the step, in training order.
            left: unclaimed tasks of the queues of the version before, and of this one.
            now: the run's clock, seconds.
            head: unclaimed tasks at the head of this queue, which `opens` left to the trainers.
        """
        if self.roles.colocated:
            return int(self.roles.lockstep or self.takes(rank, step, left[1], now))
        trainer = self._trainers[rank]
        if head:  # trainer 0 has predicted this loan; later ones are not judged in its place
            trainer.prediction = trainer.prediction or (Decision(0, 0.0, 0.0), now)
            return 1
        if self._timed and self._ranks.keys().isdisjoint(
            self._generators
        ):  # all who generate by trade are gone
            return 1
        if self._cannot_judge_loan(rank):
            return 0
        moment = (step, now, len(pending))
        if self._same_moment is None or self._same_moment[0] != moment:
            rollouts = self._known_speed(sorted(self._generators))
            others = self._known_speed(
                other for other in range(self.roles.trainers) if other != rank
            )
            lending = {other: work for other, work in others.items() if work.busy}
            # Trainers train the same fragments, so those that do not lend already are idle together
            # with this one.
            state = self._lending_state(
                rank,
                rollouts,
                lending,
                step,
                pending,
                left,
                now,
                self.roles.trainers - len(lending),
            )
            self._same_moment = moment, search_loans(state), state.tasks_left > 0
        _, decision, this_step = self._same_moment
        # Later loans of a step have little left to gain, and would hide the first. One for the next
        # step gains nothing.
        if decision.lend and this_step and trainer.prediction is None:
            trainer.prediction = decision, now
        return decision.lend

    def predicted_end(
        self, rank: int, step: int, pending: Sequence[Fragment], left: Sequence[int], now: float
    ) -> float | None:
        """Return when the step that begins should end on trainer `rank`, in seconds of the run's
        clock.

        None before this trainer and every generating rank have been measured. Arguments as for
        `lend`.
        """
        working = self._known_speed(sorted(self._generators))
        known = {other for other in self._generators if other in self._ranks}
        if not working or working.keys() != known or ("train", rank) not in self._costs:
            return None
        state = self._lending_state(
            rank, working, {}, step, pending, left, now, self.roles.trainers
        )
        off = self._trainers[rank].monitor.off
        may_lend = self.spec.tag and not off and not self.roles.colocated
        return now + search_loans(replace(state, may_lend=may_lend)).predicted_step_s

    def loan_facts(self, rank: int, now: float) -> dict[str, float] | None:
        """Return what the step's first loan promised and what happened, for the log; None if
        nothing was lent."""
        prediction = self._trainers[rank].prediction
        if prediction is None:
            return None
        decision, at = prediction
        return {
            "rounds": float(decision.lend),
            "predicted_s": decision.predicted_step_s,
            "predicted_without_s": decision.predicted_without,
            "measured_s": now - at,
        }

    def _lending_state(
        self,
        rank: int,
        rollouts: Mapping[int, Work],
        lending: Mapping[int, Work],
        step: int,
        pending: Sequence[Fragment],
        left: Sequence[int],
        now: float,
        lenders: int,
    ) -> LendingState:
        """Return the search's input, for generating ranks of known speed and `lenders` trainers
        that may begin to lend."""
        plans = [self._plan(version) for version in (step - 1, step)]
        # The unclaimed tasks are the last ones of a queue, because claims go in order.
        older, own = (plan[len(plan) - n :] for plan, n in zip(plans, left, strict=True))
        working = {**rollouts, **lending}
        free = {other: work.free_in(now) for other, work in working.items()}
        in_flight: dict[int, float] = {}
        for other, work in working.items():
            if work.busy and work.step == step:
                # A group is complete when the last of its running tasks is.
                in_flight[work.group] = max(in_flight.get(work.group, 0.0), free[other])
        # With gap=0 even the first update waits for the whole batch.
        waits = pending if self.spec.gap else (sum(pending, ()), *((),) * (len(pending) - 1))
        groups = [self.spec.groups_of(fragment) for fragment in waits]
        ready = [max([in_flight.get(group, 0.0) for group in own], default=0.0) for own in groups]
        seconds = tuple(self._costs["generate", other] for other in working)
        count, times = len(rollouts), tuple(free.values())
        behind, ready_at = after_older(
            times[:count], seconds[:count], ready, _by_fragment(older, groups, step)
        )
        tasks = _by_fragment(own, groups, step)
        lend = self._costs.get(("generate", rank), max(seconds))
        cell = self._costs["train", rank]
        return LendingState(
            rollout_free=(*behind, *times[count:]),
            rollout_seconds=seconds,
            tasks_left=sum(tasks),
            fragment_tasks=tasks,
            fragment_ready=ready_at,
            train_seconds=tuple([cell * self.cells(fragment)[rank] for fragment in pending]),
            lend_seconds=lend,
            lenders=lenders,
            lenders_later=self.roles.trainers,
            ahead=all(work.version < step for work in rollouts.values()),
            switch_seconds=self._costs.get(("switch", rank), 0.0),
            tasks_later=sum(task.step > step for task in own),
            later_taken=sum(task.step > step for task in plans[1][: len(plans[1]) - len(own)]),
        )

    def _known_speed(self, ranks: Iterable[int]) -> dict[int, Work]:
        """Return what each rank of `ranks` does, of the ranks that are there and whose seconds per
        task are known."""
        return {rank: self._ranks[rank] for rank in ranks if self._has_speed(rank)}

    def _has_speed(self, rank: int) -> bool:
        """Return whether `rank` is there and its seconds per task are known."""
        return rank in self._ranks and ("generate", rank) in self._costs


def record_header(spec: ScheduleSpec, roles: Roles, last_step: int) -> dict[str, object]:
    """Return the first row of a record, from which a scheduler can be built. `last_step` is the
    run's final RL step."""
    return {"spec": asdict(spec), "roles": asdict(roles), "last_step": last_step}


def _by_fragment(
    tasks: Sequence[Task], pending: Sequence[Sequence[int]], step: int
) -> tuple[int, ...]:
    """Count per fragment (given by its groups) the tasks of RL step `step` that no earlier fragment
    waits for."""
    counts = Counter([task.group for task in tasks if task.step == step])
    return tuple([sum([counts.pop(group, 0) for group in groups]) for groups in pending])


def _json_value(value: object) -> object:
    """Return `value` as it is after a round trip through JSON."""
    return [_json_value(item) for item in value] if isinstance(value, (list, tuple)) else value
