"""What the Strategy asks of an algorithm's LightningModule, beyond Lightning's own hooks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class Learner(Protocol):
    """An algorithm, as the Strategy sees it."""

    def rollout_parameters(self) -> dict[str, Tensor]:
        """The weights that rollouts must use, by the names of `policy.trained_parameters()`."""

    def rollout_weights(self) -> AbstractContextManager[None]:
        """Inside, this rank's policy holds `rollout_parameters()`."""
