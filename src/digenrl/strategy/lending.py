"""Lending (TAG): what a trainer does until the next fragment can be trained.

    Scheduler --train--> the fragment    --wait--> the next message    --lend--> one task with the published weights

Every move is the scheduler's. `Lending` shows it what there is to see, and carries its moves out. A
lent task is made as a rollout makes it: a sample does not depend on the rank that made it.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from digenrl.schedule import update_fragments
from digenrl.schedule.order import later_fragments
from digenrl.schedule.scheduler import ASK, LEND, TRAIN
from digenrl.strategy.inbox import Inbox
from digenrl.strategy.publishing import PublishedCopy
from digenrl.strategy.rollout_loop import finish_task
from digenrl.strategy.setup import RankRuntime
from digenrl.strategy.shared import Fragment
from digenrl.strategy.stop_vote import Agreement, StopVote
from digenrl.strategy.tasks import TaskRunner
from digenrl.transport.cells import StepBoard
from digenrl.transport.weights import publish

_POLL_S = 0.2
"""Longest wait for a message before the trainer looks at everything again."""


class Lending:
    """Waits for fragments, and lends in between.

    Args:
        runner: generates tasks.
        inbox: takes messages while this trainer waits.
        published: the published weights, which every lent task uses.
        agreement: trainer 0's choices, where trainers move together.
    """

    def __init__(
        self,
        runtime: RankRuntime,
        runner: TaskRunner,
        inbox: Inbox,
        published: PublishedCopy,
        agreement: Agreement,
        stop_vote: StopVote,
    ) -> None:
        spec, world = runtime.setup.spec, runtime.setup.world
        self._spec, self._world, self._runner, self._scheduler = (
            spec,
            world,
            runner,
            runner.scheduler,
        )
        self._inbox, self._published, self._agreement = inbox, published, agreement
        self._state, self._hooks, self._stop_vote = runtime.state, runtime.hooks, stop_vote
        self._control, self._link, self._spans = runtime.control, runtime.link, runtime.spans
        self._stage = "lend" if world.rollouts else "generate"
        chooses = spec.tag or not world.rollouts
        self._together = runner.scheduler.roles.lockstep and chooses
        """Forwards are collectives, and trainers may generate, or choose a fragment: all of them
        must do so at once."""
        self._recalled = 0
        self._lost: frozenset[int] = frozenset()

    def wait_for_fragment(
        self, board: StepBoard, update: int, pending: Sequence[Fragment]
    ) -> Fragment:
        """Wait for a fragment of `pending` that can be trained now, and return it.

        Sharded trainers that may generate move together, since their every forward is a collective:
        rank 0 decides (train this fragment, or lend one round), and the others follow.
        """
        if not self._together:
            while (fragment := self._wait_for_move(board, update, pending)) is None:
                self._lend_one_task(board.step, update)
            return fragment
        while True:
            first = self._wait_for_move(board, update, pending) if self._world.rank == 0 else None
            # Trainers wait for each other here, and sort messages meanwhile.
            self._stop_vote.begin_piece(self._inbox.receive_message)
            # A position in `pending`, which is the same list on every trainer; -1: all lend one
            # round.
            choice = self._agreement.agree_on_choice(-1 if first is None else pending.index(first))
            if choice >= 0:
                self._wait_for_cells(board, pending[choice])
                return pending[choice]
            self._lend_one_task(board.step, update)

    # ---- waiting

    def _wait_for_move(
        self, board: StepBoard, update: int, pending: Sequence[Fragment]
    ) -> Fragment | None:
        """Wait. Return the fragment to train, or None as soon as this trainer should generate a
        task."""
        first = update == 0 and len(pending) == len(update_fragments(self._spec, update))
        wait = self._spans.span(
            "wait", cause="first_fragment" if first else "tail", step=board.step
        )
        waited = False
        with ExitStack() as span:
            while True:
                # Everything that has arrived counts in the decision below.
                while self._inbox.receive_message(0.0):
                    pass
                self._spans.record_finished()  # the search below asks what training took
                self._see_losses()
                fragment = self._next_trainable_fragment(board, pending)
                move = self._next_move(board, update, pending, fragment)
                if move in (TRAIN, LEND):
                    return fragment if move == TRAIN else None
                if not waited:
                    waited = True
                    span.enter_context(wait)
                self._republish_previous(board.step)
                self._inbox.receive_message(_POLL_S)
                self._runner.settle_sends()
                self._stop_vote.check_for_stop()

    def _next_trainable_fragment(
        self, board: StepBoard, pending: Sequence[Fragment]
    ) -> Fragment | None:
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

    def _next_move(
        self, board: StepBoard, update: int, pending: Sequence[Fragment], fragment: Fragment | None
    ) -> str:
        """Return the scheduler's move. Ask the search first if the scheduler wants that."""
        facts = (
            self._world.rank,
            update,
            pending,
            fragment,
            len(board.completed),
            self._runner.unclaimed_tasks(board.step),
        )
        move = self._scheduler.next_move(*facts)
        if move != ASK:
            return move
        rounds = self._hooks.on_bubble(board, [*pending, *later_fragments(self._spec, update)])
        return self._scheduler.next_move(*facts, rounds)

    def _see_losses(self) -> None:
        """Show the scheduler that a rank is gone, which may leave its tasks to the trainers."""
        if self._world.rollouts and (lost := self._control.lost_ranks()) != self._lost:
            self._lost = lost
            self._runner.report_other_ranks()

    def _wait_for_cells(self, board: StepBoard, fragment: Fragment) -> None:
        """Wait until this rank holds every cell that rank 0 held when it chose `fragment`."""
        needed = tuple(range(self._spec.prompts)) if self._spec.gap == 0 else fragment
        with self._spans.span("wait", cause="straggler", step=board.step):
            while not board.is_complete(needed):
                self._inbox.receive_message(_POLL_S)
                self._stop_vote.check_for_stop()

    # ---- generating

    def _lend_one_task(self, step: int, update: int) -> None:
        """Generate one task with the published weights. A loan that has begun runs to its end.
        Taking the weights up and putting them away is measured."""
        between = self._stop_vote.begin_piece if self._together else self._stop_vote.between_steps
        task, now = self._runner.claim_task(step), self._spans.now
        if task is None:
            if self._together:  # a task that is thrown away keeps the collectives in step
                # The others gather this trainer's shard: it must be the published one too.
                with self._published.in_use(update):
                    last = self._hooks.plan_tasks(step)[-1]
                    self._runner.run_discarded(last, lambda _: between())
            return
        began = now()
        with self._published.in_use(update):
            loaned = now()
            begun = self._runner.begin_task(task)
            finish_task(self._runner, begun, self._stage, lambda _: between())
            done = now()
        if self._world.rollouts:
            # One way: half of taking the weights up and putting them away.
            switch = ((loaned - began) + (now() - done)) / 2
            self._scheduler.measured("switch", self._world.rank, switch)

    def predicted_end(self, step: int) -> float | None:
        """Return the second of the run's clock at which RL step `step` should end. None before
        costs are known."""
        return self._scheduler.predicted_end(
            *self._runner.prepare_search(step, later_fragments(self._spec, -1))
        )

    def rounds_to_lend(self, board: StepBoard, pending: Sequence[Fragment]) -> int:
        """Return how many tasks this idle trainer should generate now: the scheduler's search, with
        what is seen at present."""
        facts, head = (
            self._runner.prepare_search(board.step, pending),
            self._runner.claims.head_left,
        )
        return self._scheduler.lend(*facts, head(board.step))

    # ---- deaths

    def _republish_previous(self, version: int) -> None:
        """Publish the version before again if a task of it came back (one-step asynchrony). Perhaps
        no rank holds those weights any more. A rollout gets that version first, and then the
        present version."""
        before, present = self._state.previous, self._state.current
        if self._world.rank != 0 or before is None:
            return
        # Tasks of the version before that came back and have no owner. The version is published
        # again only when there are more of them than at the last look.
        waiting = self._runner.claims.count_returned(
            version - 1, len(self._hooks.plan_tasks(version - 1))
        )
        if waiting > self._recalled:
            self._runner.report_other_ranks()
            receiver = self._scheduler.first_free(self._spans.now())
            rollouts = self._control.surviving_ranks(self._world.rollout_ranks)
            if (
                not rollouts
            ):  # a rank that joins later asks for the present version, and this is called again
                return
            if receiver is None:
                receiver = rollouts[0]
            for number, tensors in ((version - 1, before), (version, present)):
                publish(number, tensors, self._link, {receiver: ()}, agree=lambda digest: None)
        self._recalled = waiting
