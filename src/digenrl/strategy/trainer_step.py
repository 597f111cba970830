"""One RL step of a trainer rank, from top to bottom. Lightning's hooks call these stages in this
order.

    wait       for a complete, scored fragment; a trainer that lends generates meanwhile (`lending`)
    train      its micro-batches: forward and backward; Lightning accumulates
    reduce     after the last one of an update: every trainer arrives, gradients are averaged once
    update     Lightning's optimizer step
    publish    after the last update of the logical batch; rollouts begin what waits for the version

An RL step is an epoch of Lightning. examples/grpo_in_one_file.py shows the same stages in one
process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch.distributed as dist

from digenrl.schedule import update_fragments
from digenrl.strategy import shard
from digenrl.strategy.exchange import GradientExchange
from digenrl.strategy.inbox import Inbox
from digenrl.strategy.lending import Lending
from digenrl.strategy.publishing import Publisher
from digenrl.strategy.setup import RankRuntime
from digenrl.strategy.shares import Shares
from digenrl.strategy.step_ledger import StepLedger
from digenrl.strategy.stop_vote import StopVote
from digenrl.types import TrainBatch


class TrainerStep:
    """What Lightning gets in place of the train dataloader, and what its hooks do with each batch.

    It is *sized*: an unsized loader makes Lightning fetch the first fragment of the next batch
    before the optimizer step, which on-policy never comes.
    """

    def __init__(
        self, runtime: RankRuntime, inbox: Inbox, lending: Lending, ledger: StepLedger,
        shares: Shares, stop_vote: StopVote, publisher: Publisher,
    ) -> None:  # fmt: skip
        setup = runtime.setup
        self._setup, self._spec, self._world = setup, setup.spec, setup.world
        self._policy, self._state, self._spans = setup.engine.policy, runtime.state, runtime.spans
        self._inbox, self._lending, self._ledger, self._shares = inbox, lending, ledger, shares
        self._stop_vote, self._publisher = stop_vote, publisher
        self.exchange = GradientExchange(setup.gradient_share, setup.world.trainers)
        """Averages gradients, and holds what has not been sent."""
        self._accumulating = False
        self.together: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context of what a group of trainers computes together; set when the model has moved."""

    def __len__(self) -> int:
        return self._setup.micro_batches_per_update * self._spec.updates_per_batch

    def __iter__(self) -> Iterator[TrainBatch]:
        """Wait for each fragment, and yield its micro-batches to be trained."""
        board = self._inbox.open_board(self._state.version)
        self._ledger.open_step(self._lending.predicted_end(board.step))
        for update in range(self._spec.updates_per_batch):
            # a replica does not wait for what others train while something of its own is ready
            pending = sorted(
                update_fragments(self._spec, update), key=lambda f: not board.trains_fragment(f)
            )
            while pending:
                fragment = self._lending.wait_for_fragment(board, update, pending)
                pending.remove(fragment)
                self._ledger.begin_fragment(board, fragment)
                for batch in board.micro_batches(fragment, last=not pending):
                    self._stop_vote.begin_micro_batch()
                    yield batch
                self._ledger.end_fragment()

    def train_micro_batch(self, batch: TrainBatch) -> AbstractContextManager[None]:
        """Begin a micro-batch, and return the context of its forward."""
        self._shares.begin_micro_batch(batch)
        return self.tokens_shared()

    @contextmanager
    def tokens_shared(self) -> Iterator[None]:
        """Let a context group compute together during the body. Raises: see
        `StopVote.memory_guarded`."""
        with self._stop_vote.memory_guarded(), self.together():
            yield

    @contextmanager
    def accumulate_gradients(self) -> Iterator[None]:
        """Accumulate gradients without reducing them: for every micro-batch of an update except the
        last."""
        self._accumulating = True
        shard.synchronise_gradients(self._policy, on=False)
        try:
            yield
        finally:
            self._accumulating = False
            shard.synchronise_gradients(self._policy, on=True)

    def reduce_gradients(self) -> None:
        """End a micro-batch. After the last one of an update, reduce the gradients of all trainers:
        the one place that scales them (design, "Scaling of gradients"). Raises: see
        `StopVote.begin_piece`."""
        self._shares.end_micro_batch()
        self._spans.progress.mark_progress()
        # In the middle of an update: gradients add up, and nothing is reduced.
        if self._accumulating:
            return
        self._ledger.end_fragment()  # what follows belongs to the update
        step, trained = self._state.version, self._policy.adapter.trained_parameters()
        if self._world.trainers > 1:
            with self._spans.span("wait", cause="straggler", step=step):
                self._stop_vote.begin_update()
                dist.barrier()  # so that the span below measures the reduction, not a straggler
        scale = self._inbox.open_board(step).gradient_scale(self._state.updates_done)
        with self._spans.span("optimizer", step=step, what="reduce"):
            self.exchange.average(trained, scale)

    def count_update(self) -> bool:
        """Count the optimizer step that was made; return whether it ends the RL step."""
        self._state.updates_done += 1
        return self._state.updates_done == self._spec.updates_per_batch

    def publish(self) -> None:
        """Make the weights the next version, and close the RL step."""
        self._publisher.publish(self._state.version + 1)
        self._ledger.close_step(self._state.version)
        self._state.updates_done = 0
