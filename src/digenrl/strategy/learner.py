"""What the Strategy asks of an algorithm's LightningModule, beyond Lightning's own hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

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
