"""The loop of a rollout rank, from top to bottom.

    claim      the next task of the version in use, or one that a leaving rank has begun
    generate   its denoising steps, all with that version's weights
    score      what they made, in the scorer's thread
    send       cells and rewards to every trainer
    adopt      the next version, once the queue of the version in use is empty

In one process, without ranks that share a queue: examples/grpo_in_one_file.py.
"""

from __future__ import annotations

from digenrl.rollout.engine import Generation
from digenrl.schedule import Task
from digenrl.schedule.claims import NOBODY
from digenrl.strategy.evaluating import EvaluationWorker
from digenrl.strategy.rollout_mail import RolloutMail
from digenrl.strategy.setup import RankRuntime
from digenrl.strategy.tasks import Interrupt, TaskRunner
from digenrl.transport.weights import adopt


def finish_task(
    runner: TaskRunner, begun: Generation, stage: str, interrupt: Interrupt | None = None
) -> None:
    """Make what is left of a task and send it, unless `interrupt` names another rank to do so."""
    made = runner.generate(begun, stage, interrupt)
    if made is not None:
        scored = runner.score(made)
        runner.send_results(made, scored)


class RolloutWorker:
    """The life of a rollout rank. `run_until_done` is in place of Lightning's fit loop."""

    def __init__(
        self, runtime: RankRuntime, runner: TaskRunner, evaluation_worker: EvaluationWorker
    ) -> None:
        self._runner, self._evaluation_worker = runner, evaluation_worker
        self._leave, self._control, self._spans = (
            runtime.setup.session.leave,
            runtime.control,
            runtime.spans,
        )
        self._parameters = runtime.setup.engine.policy.adapter.trained_parameters()
        self._mail = RolloutMail(runtime, evaluation_worker.hold_weights)
        self._version = -1
        """The version in use; -1 before the first."""

    def run_until_done(self) -> None:
        """Work until a trainer says that the run is done, or until this rank shall leave."""
        with self._mail:
            while self._control.get("done") is None:
                if self._leave.is_set():
                    return self._leave_run()
                self._control.check_abort()
                self._mail.receive_messages()
                # Finish the queue of the version in use before adopting another. Exception: an
                # older version that was published again, because one of its tasks lost its owner.
                if self._mail.has_older_version(self._version) or not self._make_task():
                    if self._mail.weights:
                        self._adopt_next_version()
                    # No task and no other version: an evaluation uses the time in which this rank
                    # would wait.
                    elif not self._make_evaluation_piece():
                        self._runner.settle_sends()
                        self._mail.wait_for_message(self._version)
        return None

    def _make_task(self) -> bool:
        """Claim, generate, score and send one task; False if there is none for this rank."""
        begun = self._claim_task()
        if begun is not None:
            finish_task(self._runner, begun, "generate", self._between_steps)
        return begun is not None

    def _claim_task(self) -> Generation | None:
        """Take a suspended task, else the next task of the queue. A suspended task of a newer
        version
        waits here until this rank has adopted that version, which is published already."""
        runner, suspended = self._runner, self._mail.suspended
        while suspended and suspended[0].task.version <= self._version:
            # A wait that ends with work is recorded as "tail", one that ends with weights so.
            self._mail.end_wait("tail")
            if (begun := runner.take_over(suspended.popleft())) is not None:
                return begun
        if self._version < 0 or not runner.takes_next_task(self._version):
            return None
        # Between the question above and this claim another rank may have taken the last task.
        if (task := runner.claim_task(self._version)) is None:
            return None
        self._mail.end_wait("tail")
        return runner.begin_task(task)

    def _between_steps(self, task: Task) -> int | None:
        """Receive messages and return None; if this rank leaves, return the rank that finishes
        `task`, or NOBODY to give the task up."""
        if self._leave.is_set():
            self._runner.stop_taking_tasks()
            receiver = self._runner.find_successor(task, self._version)
            return NOBODY if receiver is None else receiver
        self._mail.receive_messages()
        return None

    def _adopt_next_version(self) -> None:
        """Take the next version into use."""
        self._mail.end_wait("startup" if self._version < 0 else "weights")
        weights = self._mail.weights.popleft()
        self._version = weights.number
        # Only here, between two tasks: a trajectory under way keeps its version (I7).
        with self._spans.span("adopt", version=self._version, digest=weights.digest):
            adopt(self._parameters, weights)
        self._evaluation_worker.drop_old_weights(self._version)
        self._runner.announce_work(self._version)

    def _leave_run(self) -> None:
        """Leave: send what is finished, and give away the suspended tasks that wait here."""
        self._runner.stop_taking_tasks()
        self._mail.receive_messages()
        for suspended in self._mail.suspended:
            self._runner.hand_over_task(suspended)
        # Finished tasks must be scored and sent before this rank says that it has left.
        self._runner.settle_sends(wait=True)

    def _make_evaluation_piece(self) -> bool:
        """Make a piece of the evaluation of the version in use; False if there is none for this
        rank."""
        claim = self._evaluation_worker.claim_piece(self._version)
        if claim is not None:
            self._mail.end_wait("tail")
            self._evaluation_worker.make_piece(self._version, claim, self._mail.receive_messages)
        return claim is not None
