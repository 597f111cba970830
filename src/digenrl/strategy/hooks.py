"""The four decisions of a schedule that a researcher may take otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from digenrl.schedule import Task
from digenrl.transport.cells import Placement, StepBoard

Fragment = tuple[int, ...]
"""Numbers of the portions that are trained together."""


class Hooks(Protocol):
    """The hooks of `DisaggregatedStrategy`, as its parts call them. A hook changes time, never gradients."""

    def plan_tasks(self, version: int) -> tuple[Task, ...]:
        """Return the tasks that holders of `version` generate, in claim order (GAP)."""

    def cut_fragment(self, pending: Sequence[Fragment], board: StepBoard) -> Fragment | None:
        """Return the fragment of `pending` to train now, or None to wait (GAP)."""

    def place_timesteps(self, fragment: Fragment, step: int) -> Placement:
        """Return the trainer and the micro-batch of each cell of a fragment of RL step `step` (TSP)."""

    def on_bubble(self, board: StepBoard, pending: Sequence[Fragment]) -> int:
        """Return how many rollout tasks this idle trainer takes now (TAG)."""
