"""What the Strategy asks of an algorithm's LightningModule, beyond Lightning's own hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from torch import Tensor

from digenrl.models.policy import Policy
from digenrl.schedule import ScheduleSpec
from digenrl.types import CellBlock


class Learner(Protocol):
    """An algorithm, as the Strategy sees it."""

    keep_base_means: Callable[[CellBlock, Tensor], None] | None
    """Called with what the base model gives for a trained block, where that was computed."""

    def rollout_parameters(self) -> dict[str, Tensor]:
        """The weights that rollouts must use, by the names of `policy.trained_parameters()`."""

    def evaluated_parameters(self) -> dict[str, Tensor]:
        """Likewise, the weights that evaluations are of: those of `averaged`."""

    def useful(self, rewards: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
        """[P, G] bool: samples whose cells can have a gradient."""

    def teaches(self, rewards: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
        """[P] bool: groups whose samples do not all score alike."""

    def rollout_weights(self) -> AbstractContextManager[None]:
        """Inside, this rank's policy holds `rollout_parameters()`."""


class PublishedCopy:
    """Copy of the published adapter beside the one in training, for trainers that lend between updates (I6).

    Only replicas with an adapter keep one: a copy of a whole model would not fit, and a sharded one would have to be
    gathered. The others lend before the first update alone.
    """

    def __init__(self, policy: Policy, learner: Learner, spec: ScheduleSpec, sharding: str) -> None:
        self._learner = learner
        self._parameters = policy.trained_parameters()
        whole = sum(parameter.numel() for parameter in policy.transformer.parameters())
        adapter = sum(parameter.numel() for parameter in self._parameters.values()) < whole
        self.kept = spec.tag and spec.updates_per_batch > 1 and sharding == "ddp" and adapter
        self._tensors: dict[str, Tensor] = {}

    def keep(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors`, which are the published version from now on."""
        if self.kept:
            self._tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    @contextmanager
    def in_use(self, updates_done: int) -> Iterator[None]:
        """Inside, the policy holds the published version; afterwards its own weights, bit by bit (I6)."""
        if updates_done == 0:
            with self._learner.rollout_weights():
                yield
            return
        own = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        try:
            for name, parameter in self._parameters.items():
                parameter.data.copy_(self._tensors[name])
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data.copy_(own[name])
