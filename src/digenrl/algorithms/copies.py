"""Copies of the trained parameters: moving averages, the old policy, the weights at the beginning
of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class ParameterCopy:
    """A copy of named parameters, made on first use; on sharded parameters it holds shards.

    Tensors are cloned, never aliased: `.detach().cpu()` of a CPU tensor is the live weight itself.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    @torch.no_grad()
    def follow_parameters(self, parameters: Mapping[str, nn.Parameter], decay: float = 0.0) -> None:
        """Set copy = decay*copy + (1-decay)*parameter. The first call copies, and so does decay
        0."""
        if not self.tensors:
            decay = 0.0
        for name, parameter in parameters.items():
            if decay == 0.0:
                self.tensors[name] = parameter.detach().clone()
            else:
                copy = self._copy_of(name, parameter)
                # In place: no further set of weights is made.
                copy.mul_(decay).add_(parameter.detach(), alpha=1.0 - decay)

    @contextmanager
    def swapped_into(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Give the parameters the copy's values during the body, then restore their own values
        exactly.

        Without a copy the parameters stay unchanged.

        Values are written through `.data` into the same storage, so FSDP's views stay valid as long
        as no backward runs inside.
        """
        if not self.tensors:
            yield
            return
        # A third set of weights on the device, while the body runs.
        kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        try:
            for name, parameter in parameters.items():
                parameter.data.copy_(self._copy_of(name, parameter))
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.data.copy_(kept[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors themselves, for a checkpoint."""
        return dict(self.tensors)

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the values. They move to their parameter's device on next use."""
        self.tensors = {name: value.clone() for name, value in tensors.items()}

    def _copy_of(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Return the stored copy of one parameter, moved to the parameter's device."""
        self.tensors[name] = copy = self.tensors[name].to(parameter.device)
        return copy


class BatchStart(ParameterCopy):
    """The weights at the beginning of a logical batch, for losses that compare with them in its
    later updates."""

    def __init__(self) -> None:
        super().__init__()
        self._version: int | None = None

    def keep_start(self, parameters: Mapping[str, nn.Parameter], version: int) -> None:
        """Copy the parameters where this is the first micro-batch of `version`."""
        if version != self._version:
            self.follow_parameters(parameters)
            self._version = version


class Ema:
    """Exponential moving average of the trained parameters, for evaluation and export; rollouts use
    the raw weights.

    After n optimizer steps, if n + 1 is a multiple of `every`: copy = d*copy + (1-d)*parameter.
    There d = min((1+n)/(10+n), `decay`)^`times` (yifan123/flow_grpo ema.py:33-56: 0.9, 8).
    Flow-GRPO averages at every micro-batch: `times=m` equals that for updates of m micro-batches.
    """

    def __init__(self, decay: float = 0.9, every: int = 8, times: int = 1) -> None:
        if not 0 <= decay < 1 or min(every, times) < 1:
            raise ValueError(
                f"ema needs 0 <= decay < 1, every and times >= 1, got {decay}, {every}, {times}"
            )
        self.decay, self.every, self.times, self.steps = decay, every, times, 0
        self.copy = ParameterCopy()

    def begin_average(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Start from the parameters, unless a checkpoint has filled the average already."""
        if not self.copy.tensors:
            self.copy.follow_parameters(parameters)

    def update_average(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Count an optimizer step. Average if the new count plus 1 is a multiple of `every`."""
        self.steps += 1
        if (self.steps + 1) % self.every == 0:
            self.copy.follow_parameters(parameters, self.decay_at(self.steps))

    def decay_at(self, steps: int) -> float:
        """Return min((1+n)/(10+n), decay)^times for n = `steps`.

        Example:
            >>> [Ema(decay=0.9).decay_at(steps) for steps in (0, 8, 1000)]
            [0.1, 0.5, 0.9]
        """
        return min((1 + steps) / (10 + steps), self.decay) ** self.times
