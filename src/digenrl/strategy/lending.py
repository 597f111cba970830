"""TAG at run time: turns what this trainer knows into the pure search's state, and its verdict into a claim.

Costs are measured: every trajectory carries the seconds and the rank that made it, every fragment is timed. Before a
cost is known nothing is lent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from digenrl.cluster.claims import Claims, Work
from digenrl.cluster.world import World
from digenrl.schedule.search import Costs, Decision, LendingMonitor, LendingState, after_older, search
from digenrl.schedule.spec import ScheduleSpec, Task


@dataclass(frozen=True)
class Prediction:
    """A loan, waiting to be compared with what happens."""

    decision: Decision
    at: float


class Lender:
    """Decides whether an idle trainer should generate; learns from every step.

    Args:
        spec: the schedule.
        world: ranks by role.
        claims: to read who works on what.
        seeds: seconds by stage ("generate", "train") from the hardware profile, where it has measured ones.
        interruptible: a loan can be handed off (not that of sharded trainers, whose forwards are collectives).
    """

    def __init__(
        self,
        spec: ScheduleSpec,
        world: World,
        claims: Claims,
        seeds: dict[str, float] | None = None,
        interruptible: bool = True,
    ) -> None:
        self._spec, self._world, self._claims = spec, world, claims
        self._interruptible = spec.handoff and interruptible
        self._costs = Costs(seeds or {})
        self._monitor = LendingMonitor()
        self._open: list[Prediction] = []
        self.predicted_end: float | None = None
        """Run clock at which the step in progress was expected to end when it began; None before costs are known."""

    @property
    def off(self) -> bool:
        """Whether TAG has switched itself off."""
        return self._monitor.off

    def measured(self, stage: str, rank: int, seconds: float) -> None:
        """Take in one measured duration ("generate": one task; "train": one fragment)."""
        self._costs.update(stage, rank, seconds)

    def decide(
        self, queues: Sequence[Sequence[Task]], pending: Sequence[tuple[int, ...]], step: int, now: float
    ) -> int:
        """Rounds of tasks to lend now, 0 = wait.

        Args:
            queues: of the previous version and of the one that this trainer holds, in claim order.
            pending: untrained fragments of the step, in training order.
            step: RL step in progress.
            now: run clock, seconds.
        """
        working, lending = self._working(self._world.rollout_ranks), self._lending()
        if self.off or not working or not self._known("train", self._world.rank):
            return 0
        # Trainers train the same fragments, so those that do not lend already are idle together with this one.
        lenders = self._world.trainers - len(lending)
        state = self._state(working | lending, queues, pending, step, now, lenders)
        decision = search(state)
        # Later loans of a step have little left to gain, and would drown the first; one for the next step has nothing.
        if decision.lend and state.tasks_left and not self._open:
            self._open.append(Prediction(decision, now))
        return decision.lend

    def predict(
        self, queues: Sequence[Sequence[Task]], pending: Sequence[tuple[int, ...]], step: int, now: float
    ) -> None:
        """Expect an end of the step that begins, under the schedule's own rules and the costs measured so far; no
        expectation before every generating rank and this trainer have been measured.

        Args:
            queues: as for `decide`.
            pending: all fragments of the step, in training order.
        """
        generators = self._world.rollout_ranks if self._world.rollouts else range(self._world.trainers)
        self.predicted_end = None
        working = self._working(generators)
        known = working.keys() == set(self._claims.working(generators))
        if working and known and self._known("train", self._world.rank):
            may_lend = self._spec.tag and not self.off and self._world.rollouts > 0
            state = self._state(working, queues, pending, step, now, self._world.trainers)
            self.predicted_end = now + search(replace(state, may_lend=may_lend)).predicted_step_s

    def _left(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """Unclaimed tasks of a version's queue."""
        if not tasks:
            return tasks
        return tasks[len(tasks) - self._claims.left(tasks[0].version, len(tasks), range(len(tasks))) :]

    def _state(
        self,
        working: Mapping[int, Work],
        queues: Sequence[Sequence[Task]],
        pending: Sequence[tuple[int, ...]],
        step: int,
        now: float,
        lenders: int,
    ) -> LendingState:
        """What the search sees of generating ranks whose speed is known, rollout ranks first; `lenders` trainers may
        begin to lend now."""
        older, left = (self._left(tasks) for tasks in queues)
        free = {rank: _free_in(work, now) for rank, work in working.items()}
        in_flight = [(work.group, free[rank]) for rank, work in working.items() if work.group >= 0]
        ready = [max((end for group, end in in_flight if group in fragment), default=0.0) for fragment in pending]
        seconds = tuple(self._costs.get("generate", rank) for rank in working)
        rollouts = sum(rank in self._world.rollout_ranks for rank in working)
        times = tuple(free.values())
        behind, ready_at = after_older(times[:rollouts], seconds[:rollouts], ready, _by_fragment(older, pending, step))
        tasks = _by_fragment(left, pending, step)
        own = self._world.rank
        lend = self._costs.get("generate", own) if self._known("generate", own) else max(seconds)
        return LendingState(
            rollout_free=(*behind, *times[rollouts:]),
            rollout_seconds=seconds,
            tasks_left=sum(tasks),
            fragment_tasks=tasks,
            fragment_ready=ready_at,
            train_seconds=tuple(self._costs.get("train", own) for _ in pending),
            lend_seconds=lend,
            lenders=lenders,
            lenders_later=self._world.trainers,
            step_seconds=lend / self._spec.denoise_steps if self._interruptible else None,
            tasks_later=sum(task.step > step for task in left),
        )

    def finish_step(self, now: float) -> tuple[list[dict[str, float]], str | None]:
        """Compare this step's loans with reality: facts for the log, and the message if that switches TAG off."""
        facts, message = [], None
        for prediction in self._open:
            measured = now - prediction.at
            message = self._monitor.record(prediction.decision, measured) or message
            facts.append(
                {
                    "rounds": float(prediction.decision.lend),
                    "predicted_s": prediction.decision.predicted_step_s,
                    "predicted_without_s": prediction.decision.predicted_without,
                    "measured_s": measured,
                }
            )
        self._open.clear()
        return facts, message

    def first_free(self, now: float) -> int | None:
        """The rollout rank expected to be free first; None without rollout ranks whose speed is known."""
        working = self._working(self._world.rollout_ranks)
        return min(working, key=lambda rank: (_free_in(working[rank], now), rank), default=None)

    def _lending(self) -> dict[int, Work]:
        """What each other trainer of known speed generates at this moment; their tasks end as those of rollouts do."""
        others = self._working(rank for rank in range(self._world.trainers) if rank != self._world.rank)
        return {rank: work for rank, work in others.items() if work.group >= 0}

    def _known(self, stage: str, rank: int) -> bool:
        return (stage, rank) in self._costs.table or stage in self._costs.seeds

    def _working(self, ranks: Iterable[int]) -> dict[int, Work]:
        """What each living generating rank of known speed does."""
        found = self._claims.working(ranks)
        return {rank: work for rank, work in found.items() if self._known("generate", rank)}


def _free_in(work: Work, now: float) -> float:
    """Seconds until a rank is free."""
    return max(0.0, work.until - now) if work.group >= 0 else 0.0


def _by_fragment(tasks: Sequence[Task], pending: Sequence[tuple[int, ...]], step: int) -> tuple[int, ...]:
    """Tasks of RL step `step` in each fragment."""
    groups = [task.group for task in tasks if task.step == step]
    return tuple(sum(group in fragment for group in groups) for fragment in pending)
