"""How the trainers share the cells of an RL step."""

from __future__ import annotations

from typing import Any

from digenrl.schedule import ScheduleSpec
from digenrl.types import TrainBatch


class Shares:
    """The schedule of each RL step as its trainers share it. Here it is always the configured one;
    the extension `shares` measures the trainers and changes it."""

    def __init__(self, spec: ScheduleSpec) -> None:
        self._spec = spec

    def spec_at(self, step: int) -> ScheduleSpec:
        """Return the schedule with the shares of RL step `step`; wait until they are fixed."""
        return self._spec

    def begin(self, batch: TrainBatch) -> None:
        """Note that a micro-batch begins on this trainer."""

    def end(self) -> None:
        """Note that the micro-batch's gradients are there, and that nobody has been waited for."""

    def tell(self) -> None:
        """Publish this trainer's speed."""

    def fix(self, version: int) -> None:
        """Fix the shares of every step that `version` generates for. Trainer 0 calls this before it
        sends the version, after a collective in which all trainers published their speeds."""

    def state(self, version: int) -> dict[str, Any]:
        """Return, for the checkpoint at the end of step `version` - 1, the shares that are fixed
        already."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Undo `state`: a resumed run with as many trainers places these steps as the interrupted
        run would have."""
