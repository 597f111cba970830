"""The life of a rollout rank: take a version into use, run its tasks (`tasks.TaskRunner`), take part
in its evaluation.

    trainers --weights--> RolloutWorker: adopted between two tasks      (it waits for them when its queue is empty)
    a rollout that leaves --suspended task--> RolloutWorker                           (before its own next claim)
"""  # noqa: E501

from __future__ import annotations

from collections import deque
from contextlib import ExitStack

from digenrl.schedule import Task
from digenrl.schedule.claims import NOBODY
from digenrl.strategy.evaluating import EvaluationWorker
from digenrl.strategy.setup import Ties
from digenrl.strategy.tasks import TaskRunner
from digenrl.transport.suspended import Suspended
from digenrl.transport.weights import Arrivals, Version, adopt
from digenrl.transport.wire import Message, MessageKind


class _Leaving(Exception):
    """Raised when this rank leaves in the middle of a piece, which another rank then makes."""


class RolloutWorker:
    """The life of a rollout rank: adopt a version, empty its queue, take part in its evaluation,
    wait for the next one.

    Suspended tasks come from rollouts that leave. A rank that shall leave gives all of its tasks
    away, at the next denoising step.
    """

    def __init__(self, ties: Ties, runner: TaskRunner, evaluation_worker: EvaluationWorker) -> None:
        self._runner, self._evaluation_worker = runner, evaluation_worker
        self._world, self._leave = ties.setup.world, ties.setup.session.leave
        self._parameters = ties.setup.engine.policy.adapter.trained_parameters()
        self._control, self._link, self._spans = ties.control, ties.link, ties.spans
        self._arrivals = Arrivals(self._parameters)
        self._weights: deque[Version] = deque()
        self._suspended: deque[Suspended] = deque()
        self._asked = False
        """Whether this rank, which joined, has asked for weights."""
        self._version = -1
        self._idle_since: float | None = None
        self._idle = ExitStack()
        """Stage of the wait in progress, for heartbeats."""

    def run(self) -> None:
        """Work until a trainer says that the run is done, or until this rank shall leave."""
        with self._idle:
            while self._control.get("done") is None:
                if self._leave.is_set():
                    return self._hand_in()
                self._control.check()
                self._receive(0.0)
                if self._recalled() or not self._work_once():
                    if self._weights:
                        self._adopt()
                    elif not self._evaluate_once():
                        self._wait()
        return None

    def _hand_in(self) -> None:
        """Leave: send what is finished, and give away the suspended tasks that wait here."""
        self._runner.withdraw()
        self._receive(0.0)
        for suspended in self._suspended:
            self._runner.forward(suspended)
        self._runner.settle(wait=True)

    def _recalled(self) -> bool:
        """Whether an older version came back: a task of its queue lost its owner when nobody held
        it any more."""
        return bool(self._weights) and self._weights[0].number < self._version

    def _work_once(self) -> bool:
        """Run a suspended task, else the next of the queue; False when there is neither for this
        rank. A task of the next version waits until this rank has adopted that: its weights were
        published before it was begun."""
        if self._suspended and self._suspended[0].task.version <= self._version:
            self._end_wait("tail")
            self._runner.resume(self._suspended.popleft(), self._between_steps)
            return True
        if self._version < 0 or not self._runner.takes(self._version):
            return False
        task = self._runner.claim(self._version)
        if task is None:
            return False
        self._end_wait("tail")
        self._runner.run(task, interrupt=self._between_steps)
        return True

    def _evaluate_once(self) -> bool:
        """Make a piece of the evaluation of the version in use; False when there is none for this
        rank."""
        claim = self._evaluation_worker.claim(self._version)
        if claim is None:
            return False
        self._end_wait("tail")
        with self._spans.stage("wait reward"):  # a scorer may not be asked by two threads at once
            self._runner.settle(wait=True)
        try:
            with self._spans.span("eval", step=self._version, piece=claim.position):
                piece = self._evaluation_worker.make(
                    self._version, claim.position, self._between_steps_of_evaluation
                )
                self._link.send(0, piece)
        except _Leaving:
            self._evaluation_worker.release(self._version, claim)
        return True

    def _between_steps_of_evaluation(self) -> None:
        self._spans.progress.tick()
        self._control.check()
        self._receive(0.0)
        if self._leave.is_set():
            raise _Leaving

    def _adopt(self) -> None:
        """Take the next version into use."""
        self._end_wait("startup" if self._version < 0 else "weights")
        weights = self._weights.popleft()
        self._version = weights.number
        # Only here, between two tasks: a trajectory under way keeps its version (I7).
        with self._spans.span("adopt", version=self._version, digest=weights.digest):
            adopt(self._parameters, weights)
        self._evaluation_worker.adopted(self._version)
        self._runner.announce(self._version)

    def _wait(self) -> None:
        """Spend a moment without work."""
        if self._idle_since is None:
            self._idle_since = self._spans.now()
            self._idle.enter_context(
                self._spans.stage("wait startup" if self._version < 0 else "wait weights")
            )
        if self._version < 0 and self._world.joined:
            self._ask()
        self._runner.settle()
        self._receive(0.2)

    def _end_wait(self, cause: str) -> None:
        """End the wait in progress, if there is one, and record its cause."""
        if self._idle_since is not None:
            self._idle.close()
            self._spans.add("wait", self._idle_since, self._spans.now(), cause=cause)
            self._idle_since = None

    def _receive(self, timeout: float) -> None:
        """Sort arriving messages; wait up to `timeout` seconds for the first."""
        while (message := self._link.receive(timeout)) is not None:
            timeout = 0.0
            if message.kind is MessageKind.WEIGHTS:
                version = self._arrivals.add(message)
                if version is not None and version.number < 0:
                    self._evaluation_worker.hold(version)
                elif version is not None:
                    self._weights.append(version)
            elif message.kind is MessageKind.STATE:
                self._suspended.append(Suspended.of(message, self._world.rank))

    def _ask(self) -> None:
        """Ask trainer 0 for its newest weights, because this rank joined. Versions that are
        published from now on come by themselves."""
        if not self._asked and self._control.get("version") is not None:
            self._asked = True
            self._link.send(0, Message(MessageKind.ASK, {"rank": self._world.rank}))

    def _between_steps(self, task: Task) -> int | None:
        """Return the rank that finishes `task` if this rank leaves, or None to go on."""
        if self._leave.is_set():
            self._runner.withdraw()
            receiver = self._runner.successor(task, self._version)
            return NOBODY if receiver is None else receiver
        self._receive(0.0)
        return None
