"""TAG at run time: turns what this trainer knows into the pure search's state, and its verdict into a claim.

Costs are measured: every trajectory carries the seconds and the rank that made it, every fragment is timed. Before a
cost is known nothing is lent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from digenrl.schedule.lending import Costs, Decision, LendingMonitor, LendingState, search
from digenrl.schedule.spec import ScheduleSpec, Task
from digenrl.strategy.control import Control
from digenrl.strategy.world import World


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
        control: to read who works on what.
        seeds: seconds by stage ("generate", "train") from the hardware profile, where it has measured ones.
    """

    def __init__(
        self, spec: ScheduleSpec, world: World, control: Control, seeds: dict[str, float] | None = None
    ) -> None:
        self._spec, self._world, self._control = spec, world, control
        self._costs = Costs(seeds or {})
        self._monitor = LendingMonitor()
        self._open: list[Prediction] = []
        self.predicted_end: float | None = None
        """Run clock at which the latest search expected the step to end."""

    @property
    def off(self) -> bool:
        """Whether TAG has switched itself off."""
        return self._monitor.off

    def measured(self, stage: str, rank: int, seconds: float) -> None:
        """Take in one measured duration ("generate": one task; "train": one fragment)."""
        self._costs.update(stage, rank, seconds)

    def decide(self, tasks: Sequence[Task], pending: Sequence[tuple[int, ...]], step: int, now: float) -> int:
        """Rounds of tasks to lend now, 0 = wait.

        Args:
            tasks: queue(version), in claim order.
            pending: untrained fragments of the update in progress, in training order.
            step: RL step in progress.
            now: run clock, seconds.
        """
        rollouts = [rank for rank in self._world.rollout_ranks if self._known("generate", rank)]
        if self.off or not rollouts or not self._known("train", self._world.rank):
            return 0
        claimed = self._control.claimed(f"v{tasks[0].version}") if tasks else 0
        left = [task for task in tasks[claimed:] if task.step == step]
        free, in_flight = self._busy(rollouts, now)
        lend = (
            self._costs.get("generate", self._world.rank)
            if self._known("generate", self._world.rank)
            else max(self._costs.get("generate", rank) for rank in rollouts)
        )
        state = LendingState(
            rollout_free=tuple(free[rank] for rank in rollouts),
            rollout_seconds=tuple(self._costs.get("generate", rank) for rank in rollouts),
            tasks_left=sum(task.group in fragment for task in left for fragment in pending),
            fragment_tasks=tuple(sum(task.group in fragment for task in left) for fragment in pending),
            fragment_ready=tuple(
                max((end for group, end in in_flight if group in fragment), default=0.0) for fragment in pending
            ),
            train_seconds=tuple(self._costs.get("train", self._world.rank) for _ in pending),
            lend_seconds=lend,
        )
        decision = search(state)
        self.predicted_end = now + decision.predicted_step_s
        if (
            decision.lend and not self._open
        ):  # later loans of a step have little left to gain, and would drown the first
            self._open.append(Prediction(decision, now))
        return decision.lend

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
        rollouts = [rank for rank in self._world.rollout_ranks if self._known("generate", rank)]
        free, _ = self._busy(rollouts, now)
        return min(free, key=lambda rank: (free[rank], rank), default=None)

    def _known(self, stage: str, rank: int) -> bool:
        return (stage, rank) in self._costs.table or stage in self._costs.seeds

    def _busy(self, rollouts: Sequence[int], now: float) -> tuple[dict[int, float], list[tuple[int, float]]]:
        """Seconds until each rollout is free, and (group, seconds until done) of the tasks in flight."""
        free: dict[int, float] = {}
        in_flight: list[tuple[int, float]] = []
        for rank in rollouts:
            note = self._control.get(f"task/{rank}") or ""
            free[rank] = 0.0
            if note:
                group, since = note.split(":")
                free[rank] = max(0.0, float(since) + self._costs.get("generate", rank) - now)
                in_flight.append((int(group), free[rank]))
        return free, in_flight
