"""Counters and weights of a trainer that several parts of the Strategy share, and that a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class TrainerState:
    """Position of a trainer in its run."""

    first_step: int = 0
    """RL step with which this attempt began: 0, or the step of the checkpoint. Rollouts know it too."""
    version: int = 0
    """Logical batches published so far = the RL step in progress."""
    updates_done: int = 0
    """Optimizer updates done within the step in progress."""
    previous: dict[str, Tensor] | None = None
    """Weights of `version` - 1, without which one-step asynchrony cannot resume exactly. A checkpoint holds them."""
    current: dict[str, Tensor] = field(default_factory=dict)
    """Weights of `version`, on trainer 0: for an exact resume, and for a rank that joins while no rollout holds any."""
