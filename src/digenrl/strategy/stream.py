"""The fragment stream of a trainer rank: what the Strategy gives Lightning in place of the train dataloader.

It is *sized*: an unsized loader makes Lightning fetch the next batch's first fragment before the optimizer step, which
on-policy never comes. One Lightning epoch is one RL step, so `len` is the number of micro-batches of one logical batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from digenrl.schedule import Task, fragments
from digenrl.transport.cells import Part, StepBoard
from digenrl.transport.weights import publish
from digenrl.transport.wire import Kind
from digenrl.types import TrainBatch

if TYPE_CHECKING:
    from digenrl.strategy.disaggregated import DisaggregatedStrategy


class FragmentStream:
    """Complete, scored fragments as micro-batches, in the order that the schedule fixes; waits and lends in between."""

    def __init__(self, strategy: DisaggregatedStrategy) -> None:
        self._strategy = strategy
        self._boards: dict[int, StepBoard] = {}
        self._recalled = 0

    def __len__(self) -> int:
        return self._strategy.micro_batches_per_update * self._strategy.spec.updates_per_batch

    def __iter__(self) -> Iterator[TrainBatch]:
        strategy = self._strategy
        step = strategy.version
        self._boards = {number: board for number, board in self._boards.items() if number >= step}
        board = self._board(step)
        queues = (strategy.plan_tasks(step - 1), strategy.plan_tasks(step))
        strategy.book.open(step, [*queues[0], *queues[1]])
        everything = [
            fragment
            for update in range(strategy.spec.updates_per_batch)
            for fragment in fragments(strategy.spec, update)
        ]
        strategy.lender.predict(queues, everything, step, strategy.spans.now())
        for update in range(strategy.spec.updates_per_batch):
            pending = list(fragments(strategy.spec, update))
            while pending:
                fragment = (self._wait_together if strategy.lockstep else self._wait)(board, pending)
                pending.remove(fragment)
                strategy.book.begin_fragment(board, fragment)
                yield from board.batches(fragment)
                strategy.book.end_fragment()

    def _board(self, step: int) -> StepBoard:
        if step not in self._boards:
            strategy = self._strategy
            weights = strategy.engine.reward_weights
            self._boards[step] = StepBoard(
                strategy.spec,
                lambda fragment: strategy.place_timesteps(fragment, step),
                strategy.world.rank,
                step,
                weights,
                lockstep=strategy.sharding != "ddp",
            )
        return self._boards[step]

    def _wait(self, board: StepBoard, pending: list[tuple[int, ...]]) -> tuple[int, ...]:
        """The next fragment; everything that a trainer does in a bubble happens here."""
        strategy = self._strategy
        spans = strategy.spans
        waiting_since: float | None = None
        first = len(pending) == len(fragments(strategy.spec, 0)) and strategy.updates_done == 0

        def end_wait() -> None:
            nonlocal waiting_since
            if waiting_since is not None:
                cause = "first_fragment" if first else "tail"
                spans.add("wait", waiting_since, spans.now(), cause=cause, step=board.step)
                waiting_since = None

        while True:
            while self._receive(0.0):
                pass
            fragment = strategy.cut_fragment(pending, board)
            if fragment is not None and not strategy.owes_generation(pending):
                end_wait()
                return fragment
            if strategy.may_lend and (task := strategy.lend(board, pending)) is not None:
                end_wait()
                self._lend(board, pending, task)
                continue
            if waiting_since is None:
                waiting_since = spans.now()
                strategy.show("wait fragment")
            self._recall()
            self._receive(0.2)
            strategy.runner.settle()
            strategy.control.check()

    def _wait_together(self, board: StepBoard, pending: list[tuple[int, ...]]) -> tuple[int, ...]:
        """`_wait` for sharded trainers, whose every forward is a collective: rank 0 decides (train this fragment, or
        lend one round), the others follow its broadcast, and a rank without a task makes the same forwards."""
        strategy = self._strategy
        while True:
            choice = strategy.agree(self._choose(board, pending) if strategy.is_global_zero else 0)
            if choice < 0:
                self._lend_together()
                continue
            fragment = pending[choice]
            whole = tuple(range(strategy.spec.prompts)) if strategy.spec.gap == 0 else fragment
            with strategy.spans.span("wait", cause="straggler", step=board.step):
                while not board.is_complete(whole):
                    self._receive(0.2)
                    strategy.control.check()
            return fragment

    def _choose(self, board: StepBoard, pending: list[tuple[int, ...]]) -> int:
        """Rank 0's decision: the index of the fragment to train, or -1 to lend one round."""
        strategy = self._strategy
        first = strategy.updates_done == 0 and len(pending) == len(fragments(strategy.spec, 0))
        with strategy.spans.span("wait", cause="first_fragment" if first else "tail", step=board.step):
            while True:
                while self._receive(0.0):
                    pass
                fragment = strategy.cut_fragment(pending, board)
                if fragment is not None and not strategy.owes_generation(pending):
                    return pending.index(fragment)
                if strategy.may_lend and strategy.wants_loan(board, pending):
                    return -1
                self._recall()
                self._receive(0.2)
                strategy.runner.settle()
                strategy.control.check()

    def _lend_together(self) -> None:
        """One task on every trainer rank; where none is left, one that is thrown away keeps the collectives in step."""
        strategy = self._strategy
        task = strategy.runner.claim(strategy.version)
        if task is None:
            return strategy.runner.idle_run(strategy.plan_tasks(strategy.version)[-1])
        with strategy.published.in_use(strategy.learner, strategy.updates_done):
            strategy.runner.run(task, "generate" if strategy.world.rollouts == 0 else "lend")

    def _lend(self, board: StepBoard, pending: list[tuple[int, ...]], task: Task) -> None:
        """Run one rollout task here; with hand-off it is passed on as soon as a fragment is ready."""
        strategy = self._strategy
        colocated = strategy.world.rollouts == 0

        def interrupt(task: Task, steps_left: int) -> int | None:
            while self._receive(0.0):
                pass
            return strategy.heir(board, pending, task)

        with strategy.published.in_use(strategy.learner, strategy.updates_done):
            strategy.runner.run(
                task,
                "generate" if colocated else "lend",
                interrupt if strategy.spec.handoff and not colocated else None,
            )

    def _receive(self, timeout: float) -> bool:
        """Take one message if there is one within `timeout` seconds."""
        message = self._strategy.link.receive(timeout)
        if message is None:
            return False
        if message.kind is Kind.CELLS:
            strategy, part = self._strategy, Part(message)
            step, version = part.meta["step"], part.meta["version"]
            # Refused: a late result of a task that went back when its owner was lost.
            if step >= strategy.version and strategy.claims.accepts(version, part.claim):
                strategy.lender.measured("generate", part.claim.rank, part.seconds)
                if self._board(step).add(part):
                    strategy.claims.received(version, part.claim.position)
        return True

    def _recall(self) -> None:
        """One-step asynchrony: a task of the version before came back, and perhaps no rank holds those weights any
        more. One rollout gets them again, and then the present ones."""
        strategy = self._strategy
        if not strategy.is_global_zero or strategy.previous is None:
            return
        before = strategy.version - 1
        waiting = strategy.claims.returned(before, len(strategy.plan_tasks(before)))
        if waiting > self._recalled:
            heir = strategy.lender.first_free(strategy.spans.now())
            if heir is None:
                heir = strategy.control.survivors(strategy.world.rollout_ranks)[0]
            for version, tensors in ((before, strategy.previous), (strategy.version, strategy.current)):
                publish(version, tensors, strategy.link, [heir], agree=lambda digest: None)
        self._recalled = waiting
