"""What a trainer does while no fragment is ready: it waits, or it generates (TAG).

Every move is the policy's. This file shows it what there is to see, and carries its moves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from digenrl.cluster.control import Control
from digenrl.cluster.world import World
from digenrl.record.span_log import SpanLog
from digenrl.schedule import ScheduleSpec, Task, fragments
from digenrl.schedule.order import later_fragments
from digenrl.schedule.policy import ASK, LEND, TRAIN
from digenrl.strategy.agreement import Agreement
from digenrl.strategy.hooks import Fragment, Hooks
from digenrl.strategy.learner import PublishedCopy
from digenrl.strategy.stop_vote import StopVote
from digenrl.strategy.stream import Inbox
from digenrl.strategy.trainer_state import TrainerState
from digenrl.strategy.worker import Interrupt, TaskRunner
from digenrl.transport.cells import StepBoard
from digenrl.transport.link import Link
from digenrl.transport.weights import publish

_POLL_S = 0.2
"""Longest wait for a message before the trainer looks at everything again."""


class Lending:
    """Waits for fragments, and lends in between.

    Args:
        spec: the schedule.
        world: this rank's place.
        runner: generates tasks.
        hooks: the researcher's decisions.
        inbox: takes messages while this trainer waits.
        published: the published weights, which every lent task uses.
        agreement: trainer 0's choices, where trainers move together.
        state: weights of the present version and of the one before.
    """

    def __init__(
        self,
        spec: ScheduleSpec,
        world: World,
        runner: TaskRunner,
        hooks: Hooks,
        inbox: Inbox,
        published: PublishedCopy,
        agreement: Agreement,
        state: TrainerState,
        control: Control,
        link: Link,
        spans: SpanLog,
        stop_vote: StopVote,
    ) -> None:
        self._spec, self._world, self._runner, self._policy = spec, world, runner, runner.policy
        self._inbox, self._published, self._agreement, self._state = (
            inbox,
            published,
            agreement,
            state,
        )
        self._hooks, self._control, self._link, self._spans, self._stop_vote = (
            hooks,
            control,
            link,
            spans,
            stop_vote,
        )
        self._stage = "lend" if world.rollouts else "generate"
        chooses = spec.tag or not world.rollouts
        self._together = runner.policy.roles.lockstep and chooses
        """Forwards are collectives, and trainers may generate, or choose a fragment: all of them
        must do so at once."""
        self._recalled = 0
        self._lost: frozenset[int] = frozenset()

    def next_fragment(self, board: StepBoard, update: int, pending: Sequence[Fragment]) -> Fragment:
        """Wait for a fragment of `pending` that can be trained now, and return it.

        Sharded trainers that may generate move together, since their every forward is a collective:
        rank 0 decides (train this fragment, or lend one round), and the others follow.
        """
        if not self._together:
            while (fragment := self._wait(board, update, pending)) is None:
                self._lend(board.step, update)
            return fragment
        while True:
            first = self._wait(board, update, pending) if self._world.rank == 0 else None
            self._stop_vote.begin(self._inbox.receive)
            choice = self._agreement.choose(-1 if first is None else pending.index(first))
            if choice >= 0:
                self._wait_for_cells(board, pending[choice])
                return pending[choice]
            self._lend_together(board.step, update)

    # ---- waiting

    def _wait(self, board: StepBoard, update: int, pending: Sequence[Fragment]) -> Fragment | None:
        """Wait. Return the fragment to train, or None as soon as this trainer should generate a
        task."""
        first = update == 0 and len(pending) == len(fragments(self._spec, 0))
        wait = self._spans.span(
            "wait", cause="first_fragment" if first else "tail", step=board.step
        )
        waited = False
        with ExitStack() as span:
            while True:
                while self._inbox.receive(0.0):
                    pass
                self._see_losses()
                fragment = self._cut(board, pending)
                move = self._move(board, update, pending, fragment)
                if move in (TRAIN, LEND):
                    return fragment if move == TRAIN else None
                if not waited:
                    waited = True
                    span.enter_context(wait)
                self._recall(board.step)
                self._pause()

    def _cut(self, board: StepBoard, pending: Sequence[Fragment]) -> Fragment | None:
        """Return the fragment that could be trained now. Trainers that move together need one that
        all of them hold: a rollout may have died when it had sent its results to some of them."""
        fragment = self._hooks.cut_fragment(pending, board)
        if fragment is None or not (self._together and self._world.rollouts):
            return fragment
        held = partial(self._runner.claims.held_by, trainers=self._world.trainers)
        return (
            fragment
            if all(held(version, claim.position) for version, claim in board.made_under(fragment))
            else None
        )

    def _move(
        self, board: StepBoard, update: int, pending: Sequence[Fragment], fragment: Fragment | None
    ) -> str:
        """Return the policy's move. Ask the search first if the policy wants that."""
        facts = (
            self._world.rank,
            update,
            pending,
            fragment,
            len(board.completed),
            self._runner.left(board.step),
        )
        move = self._policy.next_move(*facts)
        if move != ASK:
            return move
        rounds = self._hooks.on_bubble(board, [*pending, *later_fragments(self._spec, update)])
        return self._policy.next_move(*facts, rounds)

    def _see_losses(self) -> None:
        """Show the policy that a rank is gone, which may leave its tasks to the trainers."""
        if self._world.rollouts and (lost := self._control.lost_ranks()) != self._lost:
            self._lost = lost
            self._runner.see()

    def _wait_for_cells(self, board: StepBoard, fragment: Fragment) -> None:
        """Wait until this rank holds every cell that rank 0 held when it chose `fragment`."""
        needed = tuple(range(self._spec.prompts)) if self._spec.gap == 0 else fragment
        with self._spans.span("wait", cause="straggler", step=board.step):
            while not board.is_complete(needed):
                self._inbox.receive(_POLL_S)
                self._control.check()
                self._stop_vote.check()

    def _pause(self) -> None:
        self._inbox.receive(_POLL_S)
        self._runner.settle()
        self._control.check()
        self._stop_vote.check()

    # ---- generating

    def _lend(self, step: int, update: int) -> None:
        """Generate one task here. A loan that has begun runs to its end."""
        task = self._runner.claim(step)
        if task is not None:
            self._generate(task, update, lambda task: self._stop_vote.between_steps())

    def _lend_together(self, step: int, update: int) -> None:
        """One task on every trainer rank; where none is left, one that is thrown away keeps the
        collectives in step."""
        task = self._runner.claim(step)
        if task is None:
            self._runner.run_discarded(
                self._hooks.plan_tasks(step)[-1], lambda task: self._stop_vote.begin()
            )
        else:
            self._generate(task, update, lambda task: self._stop_vote.begin())

    def _generate(self, task: Task, update: int, interrupt: Interrupt) -> None:
        """Run one task with the published weights; what taking them up and putting them away costs
        is measured."""
        began = self._spans.now()
        with self._published.in_use(update):
            loaned = self._spans.now()
            self._runner.run(task, self._stage, interrupt)
            done = self._spans.now()
        if self._world.rollouts:
            switch = ((loaned - began) + (self._spans.now() - done)) / 2
            self._policy.measured("switch", self._world.rank, switch)

    def predicted_end(self, step: int) -> float | None:
        """Return the second of the run's clock at which RL step `step` should end. None before
        costs are known."""
        self._runner.see()
        left = (self._runner.left(step - 1), self._runner.left(step))
        everything = (*fragments(self._spec, 0), *later_fragments(self._spec, 0))
        return self._policy.predicted_end(
            self._world.rank, step, everything, left, self._spans.now()
        )

    def rounds(self, board: StepBoard, pending: Sequence[Fragment]) -> int:
        """How many tasks this idle trainer should generate now: the policy's search, with what is
        seen at present."""
        self._runner.see()
        left = (self._runner.left(board.step - 1), self._runner.left(board.step))
        return self._policy.lend(self._world.rank, board.step, pending, left, self._spans.now())

    # ---- deaths

    def _recall(self, version: int) -> None:
        """Publish the version before again if a task of it came back (one-step asynchrony). Perhaps
        no rank holds those weights any more. A rollout gets that version first, and then the
        present version."""
        before, present = self._state.previous, self._state.current
        if self._world.rank != 0 or before is None:
            return
        waiting = self._runner.claims.returned(
            version - 1, len(self._hooks.plan_tasks(version - 1))
        )
        if waiting > self._recalled:
            self._runner.see()
            receiver = self._policy.first_free(self._spans.now())
            rollouts = self._control.survivors(self._world.rollout_ranks)
            if (
                not rollouts
            ):  # a rank that joins later asks for the present version, and this is called again
                return
            if receiver is None:
                receiver = rollouts[0]
            for number, tensors in ((version - 1, before), (version, present)):
                publish(number, tensors, self._link, {receiver: ()}, agree=lambda digest: None)
        self._recalled = waiting
