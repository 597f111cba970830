"""Checkpoints of a trainer rank: a copy to the host, then a thread writes it while training goes
on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from digenrl.models.policy import Policy
from digenrl.record.span_log import SpanLog
from digenrl.strategy.checkpoint_io import DirectoryCheckpointIO, Writing, read_checkpoint
from digenrl.strategy.checkpoint_storage import PREFIX
from digenrl.strategy.exchange import UNSENT, empty_rows
from digenrl.strategy.shared import TrainerState


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

    def begin_writing(self, checkpoint: Mapping[str, object], path: Path) -> None:
        """Begin to write `checkpoint` as `path`; `wait_until_written` reports the result.

        Raises:
            OSError: the checkpoint before could not be written.
        """
        # One at a time: two would mix their collectives in one group, and hold two copies on the
        # host.
        self.wait_until_written()
        fixed = (self._state.previous or {}).values()
        with self._spans.stage("checkpoint"):
            stage = partial(self._spans.progress.stage, "checkpoint")
            self.writing = self._io.begin_writing(checkpoint, path, self._group, stage, fixed)

    def wait_until_written(self) -> None:
        """Wait until the checkpoint in writing is complete, if there is one.

        Raises:
            OSError: it could not be written; every trainer is told.
        """
        # Forgotten before it is awaited, so that a failure is raised once.
        writing, self.writing = self.writing, None
        if writing is not None:
            with self._spans.stage("wait checkpoint"):
                writing.wait_until_complete()

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        """Return the checkpoint at `path`: the rows that this trainer holds. Parameters are read in
        place."""
        return read_checkpoint(path, group=self._group, room=self._tensor_for)

    def _tensor_for(self, place: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return the tensor that an entry of a checkpoint is read into. A parameter is its own. A
        moment or an average gets memory with its parameter's device and sharding."""
        parameters = self._policy.adapter.trained_parameters()
        # The parameter's own memory: no second copy of the weights is made.
        if place.startswith("state_dict/"):
            return parameters[place.removeprefix(f"state_dict/{PREFIX}")].detach()
        if place.startswith(f"{UNSENT}/"):
            return empty_rows(size, next(iter(parameters.values())).device)
        # Such as optimizer_states/0/state/NAME/exp_avg: the parameter's name is one part of the
        # place.
        name = next((part for part in place.split("/") if part in parameters), None)
        if name is None or parameters[name].shape != size:
            return torch.empty(size, dtype=dtype)
        return torch.empty_like(parameters[name], dtype=dtype).detach()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
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
    def load_optimizers(optimizers: Sequence[Optimizer], checkpoint: Mapping[str, Any]) -> None:
        """Give each optimizer its state of `checkpoint`. The learning rate stays the
        configuration's, which a resumed run may change."""
        for optimizer, state in zip(optimizers, checkpoint["optimizer_states"], strict=True):
            rates = [group["lr"] for group in optimizer.param_groups]
            optimizer.load_state_dict(state)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
