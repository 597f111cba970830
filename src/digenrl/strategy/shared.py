"""Shared by the parts of a rank: the four decisions of a schedule that a researcher may override,
the algorithm as the Strategy sees it, and the counters of a trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from digenrl.schedule import Task
from digenrl.transport.cells import Placement, StepBoard

Fragment = tuple[int, ...]
"""Numbers of the portions that are trained together."""


class Hooks(Protocol):
    """The hooks of `DisaggregatedStrategy`, as its parts call them. A hook changes time, never
    gradients."""

    def plan_tasks(self, version: int) -> tuple[Task, ...]:
        """Return the tasks that holders of `version` generate, in claim order (GAP)."""

    def cut_fragment(self, pending: Sequence[Fragment], board: StepBoard) -> Fragment | None:
        """Return the fragment of `pending` to train now, or None to wait (GAP)."""

    def place_timesteps(self, fragment: Fragment, step: int) -> Placement:
        """Return the trainer and the micro-batch of each cell of a fragment of RL step `step`
        (TSP)."""

    def on_bubble(self, board: StepBoard, pending: Sequence[Fragment]) -> int:
        """Return how many rollout tasks this idle trainer takes now (TAG)."""


class Learner(Protocol):
    """An algorithm: what the Strategy asks of its LightningModule, beyond Lightning's own hooks."""

    def rollout_parameters(self) -> dict[str, Tensor]:
        """Return the weights that rollouts must use, by the names of
        `Adapter.trained_parameters`."""

    def evaluated_parameters(self) -> dict[str, Tensor]:
        """Return the weights that evaluations use, by the same names: those of `averaged`."""

    def useful_samples(self, rewards: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
        """Return [P, G] bool: samples whose cells can have a gradient."""

    def teaching_groups(
        self, rewards: Mapping[str, Tensor], weights: Mapping[str, float]
    ) -> Tensor:
        """Return [P] bool: groups whose samples do not all score alike."""

    def rollout_weights(self) -> AbstractContextManager[None]:
        """Give this rank's policy `rollout_parameters()` during the body."""


@dataclass
class TrainerState:
    """Position of a trainer in its run."""

    first_step: int = 0
    """RL step with which this attempt began: 0, or the step of the checkpoint. Rollouts know it
    too."""
    version: int = 0
    """Logical batches published so far = the RL step in progress."""
    updates_done: int = 0
    """Optimizer updates done within the step in progress."""
    previous: dict[str, Tensor] | None = None
    """Weights of `version` - 1, without which one-step asynchrony cannot resume exactly. A
    checkpoint holds them."""
    current: dict[str, Tensor] = field(default_factory=dict)
    """Weights of `version`, on trainer 0: for an exact resume, and for a rank that joins while no
    rollout holds any."""
