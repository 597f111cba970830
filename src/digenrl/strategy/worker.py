"""A rank that generates: claim a task, run it through the engine, ship the result to the trainers that own its cells.

The same `TaskRunner` serves rollout ranks, colocated ranks and trainers that lend a hand (TAG): a sample does not
depend on who made it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from digenrl.data import PromptSampler
from digenrl.rollout.engine import RolloutEngine
from digenrl.schedule import ScheduleSpec, Task
from digenrl.strategy.cells import Place, owned_positions, pack
from digenrl.strategy.control import Control
from digenrl.strategy.link import Link
from digenrl.strategy.spans import SpanLog
from digenrl.strategy.weights import adopt
from digenrl.strategy.wire import Kind, Message


class TaskRunner:
    """Claims and runs generation tasks.

    Args:
        spec: the schedule.
        plan: the Strategy's `plan_tasks`: version -> its queue of tasks, in claim order.
        place: the Strategy's `place_timesteps`: fragment -> which trainer rank trains which cells.
        trainers: number of trainer ranks.
    """

    def __init__(
        self,
        spec: ScheduleSpec,
        plan: Callable[[int], tuple[Task, ...]],
        place: Place,
        trainers: int,
        engine: RolloutEngine,
        sampler: PromptSampler,
        control: Control,
        link: Link,
        spans: SpanLog,
    ) -> None:
        self._spec, self._plan, self._place, self._trainers = spec, plan, place, trainers
        self._engine, self._sampler, self._control, self._link, self._spans = engine, sampler, control, link, spans

    def claim(self, version: int) -> Task | None:
        """The next task of the version's queue, or None when all are claimed."""
        tasks = self._plan(version)
        number = self._control.claim(f"v{version}")
        return tasks[number] if number < len(tasks) else None

    def remaining(self, version: int) -> int:
        """Unclaimed tasks of the version's queue."""
        return max(0, len(self._plan(version)) - self._control.claimed(f"v{version}"))

    def run(self, task: Task, stage: str = "generate") -> None:
        """Generate one task and ship it."""
        prompt = self._sampler.batch(task.step)[task.group]
        with self._spans.span(stage, step=task.step, group=task.group, version=task.version) as facts:
            trajectory = self._engine.generate(task, prompt)
            facts["samples"] = task.samples
        part = task.first_sample // self._spec.task_size
        with self._spans.span("send", step=task.step, group=task.group):
            for rank in range(self._trainers):
                positions = owned_positions(self._spec, self._place, rank, task.group, part)
                self._link.send(rank, pack(trajectory, positions))


class RolloutWorker:
    """The life of a rollout rank: adopt a version, empty its queue, wait for the next one."""

    def __init__(
        self, runner: TaskRunner, parameters: Mapping[str, Tensor], control: Control, link: Link, spans: SpanLog
    ) -> None:
        self._runner, self._parameters = runner, parameters
        self._control, self._link, self._spans = control, link, spans

    def run(self) -> None:
        """Work until a trainer says that the run is done."""
        cause = "startup"
        while (message := self._next_weights(cause)) is not None:
            version = int(message.meta["version"])
            with self._spans.span("adopt", version=version) as facts:
                facts["digest"] = adopt(self._parameters, message)
            while (task := self._runner.claim(version)) is not None:
                self._control.check()
                self._runner.run(task)
            cause = "weights"

    def _next_weights(self, cause: str) -> Message | None:
        """The next version in order, or None at the end of the run."""
        with self._spans.span("wait", cause=cause):
            while True:
                message = self._link.receive(timeout=0.2)
                if message is not None and message.kind is Kind.WEIGHTS:
                    return message
                if self._control.get("done") is not None:
                    return None
                self._control.check()
