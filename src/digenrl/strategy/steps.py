"""Optimizer updates, the end of an RL step, and checkpoints, as a trainer rank carries them out.

micro-batch   forward and backward of some cells; Lightning accumulates
update        after its last micro-batch: every trainer arrives, gradients are averaged once, the optimizer steps
RL step       after its last update: publication, the step's numbers, stops
checkpoint    a copy to the host, then a thread writes it while training goes on
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from digenrl.models.policy import Policy
from digenrl.record.span_log import SpanLog
from digenrl.strategy import gradients, shard
from digenrl.strategy.checkpoint_io import DirectoryCheckpointIO, Writing, read
from digenrl.strategy.checkpoint_storage import PREFIX
from digenrl.strategy.publishing import Publisher
from digenrl.strategy.setup import Ties
from digenrl.strategy.shared import TrainerState
from digenrl.strategy.shares import Shares
from digenrl.strategy.step_ledger import StepLedger
from digenrl.strategy.stop_vote import StopVote
from digenrl.strategy.stream import Inbox
from digenrl.types import TrainBatch, out_of_memory


class Steps:
    """Micro-batches, updates and the end of an RL step. The one place that scales gradients
    (design, "Scaling of gradients").

    Args:
        ties: of this rank; `updates_done` of its state changes here.
    """

    def __init__(
        self,
        ties: Ties,
        ledger: StepLedger,
        shares: Shares,
        inbox: Inbox,
        stop_vote: StopVote,
        publisher: Publisher,
    ) -> None:
        setup = ties.setup
        self._setup, self._world, self._state = setup, setup.world, ties.state
        self._policy, self._progress = setup.engine.policy, setup.session.progress
        self._spans, self._ledger, self._shares, self._inbox = ties.spans, ledger, shares, inbox
        self._stop_vote, self._publisher = stop_vote, publisher
        self._accumulating = False
        self.together: Callable[[], AbstractContextManager[None]] = nullcontext
        """Returns a context in which a group of trainers computes each forward together
        (`parallel.context`). Set after the model moved."""
        self.loss_scale = setup.micro_batches_per_update * setup.world.trainers
        """Factor of a loss, which is a sum over its cells already. It undoes Lightning's division
        by the accumulation count, and the mean over trainers."""

    @contextmanager
    def accumulation(self) -> Iterator[None]:
        """Inside, a backward pass is of a micro-batch that is not the last one of its update."""
        self._accumulating = True
        shard.synchronise_gradients(self._policy, on=False)
        try:
            yield
        finally:
            self._accumulating = False
            shard.synchronise_gradients(self._policy, on=True)

    def micro_batch(self, batch: TrainBatch) -> AbstractContextManager[None]:
        """Begin a micro-batch, and return the context of its forward."""
        self._shares.begin(batch)
        return self.tokens_shared()

    @contextmanager
    def tokens_shared(self) -> Iterator[None]:
        """Inside, a context group computes together what is trained. Each rank generates and
        evaluates alone.

        Raises:
            StepGivenUp: the device has too little memory; the version before this step is saved.
        """
        try:
            with self.together():
                yield
        except torch.OutOfMemoryError as error:
            self._stop_vote.give_up(out_of_memory(self._world.rank, self._progress.said, error))
            raise

    def backward_done(self) -> None:
        """End a micro-batch. After the last one of an update, reduce the gradients of all trainers.

        Raises:
            StepGivenUp: the step in progress ends here, on every trainer.
        """
        self._shares.end()
        self._progress.tick()
        if self._accumulating:
            return
        # what follows belongs to the update, not to a fragment's duration
        self._ledger.end_fragment()
        step, trained = self._state.version, self._policy.adapter.trained_parameters().values()
        if self._world.trainers > 1:
            with self._spans.span("wait", cause="straggler", step=step):
                self._stop_vote.begin_update()
                # so that the span below measures the reduction, not the slowest trainer
                dist.barrier()
        with self._spans.span("optimizer", step=step, what="reduce"):
            gradients.average(trained, self._world.trainers)
            gradients.scale(
                trained, self._inbox.open(step).gradient_scale(self._state.updates_done)
            )

    def update_done(self) -> bool:
        """Count an optimizer step. After the last one of a logical batch, publish its weights and
        close the RL step.

        Returns:
            Whether an RL step has ended.
        """
        state = self._state
        state.updates_done += 1
        if state.updates_done < self._setup.spec.updates_per_batch:
            return False
        self._publisher.publish(state.version + 1)
        self._ledger.close(state.version)
        state.updates_done = 0
        return True


class Checkpoints:
    """The checkpoint that is being written, and where a stored one is read to. Each trainer handles
    what it holds.

    Args:
        io: Lightning's plugin, which knows the files.
        group: the trainers, apart from the default group: a checkpoint is written from the host by
            a thread, while the default group's collectives go on.
        previous: weights of the version before, which never change and so need no copy.
    """

    def __init__(
        self,
        policy: Policy,
        spans: SpanLog,
        io: DirectoryCheckpointIO,
        group: dist.ProcessGroup,
        state: TrainerState,
    ) -> None:
        self._policy, self._spans, self._io, self._group, self._state = (
            policy,
            spans,
            io,
            group,
            state,
        )
        self.writing: Writing | None = None
        """The checkpoint that is being written, or None."""

    def begin(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Begin to write `checkpoint` as `path`; `wait` reports the result.

        Raises:
            OSError: the checkpoint before could not be written.
        """
        self.wait()
        fixed = (self._state.previous or {}).values()
        with self._spans.stage("checkpoint"):
            stage = partial(self._spans.progress.stage, "checkpoint")
            self.writing = self._io.begin(checkpoint, path, self._group, stage, fixed)

    def wait(self) -> None:
        """Wait until the checkpoint in writing is complete, if there is one.

        Raises:
            OSError: it could not be written; every trainer is told.
        """
        writing, self.writing = self.writing, None
        if writing is not None:
            with self._spans.stage("wait checkpoint"):
                writing.result()

    def load(self, path: Path) -> dict[str, Any]:
        """Return the checkpoint at `path`: the rows that this trainer holds. Parameters are read in
        place."""
        return read(path, group=self._group, room=self._room)

    def _room(self, place: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return the tensor that an entry of a checkpoint is read into. A parameter is its own. A
        moment or an average gets memory with its parameter's device and sharding."""
        parameters = self._policy.adapter.trained_parameters()
        if place.startswith("state_dict/"):
            return parameters[place.removeprefix(f"state_dict/{PREFIX}")].detach()
        name = next((part for part in place.split("/") if part in parameters), None)
        if name is None or parameters[name].shape != size:
            return torch.empty(size, dtype=dtype)
        return torch.empty_like(parameters[name], dtype=dtype).detach()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's state by the names of the parameters: numbers would depend on
        their order."""
        names, state = list(self._policy.adapter.trained_parameters()), optimizer.state_dict()
        groups = [
            {**group, "params": [names[i] for i in group["params"]]}
            for group in state["param_groups"]
        ]
        return {
            "state": {names[i]: kept for i, kept in state["state"].items()},
            "param_groups": groups,
        }

    @staticmethod
    def load_optimizers(optimizers: list[Any], checkpoint: Mapping[str, Any]) -> None:
        """Give each optimizer its state of `checkpoint`. The learning rate stays the
        configuration's, which a resumed run may change."""
        for optimizer, state in zip(optimizers, checkpoint["optimizer_states"], strict=True):
            rates = [group["lr"] for group in optimizer.param_groups]
            optimizer.load_state_dict(state)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
