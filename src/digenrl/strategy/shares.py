"""How the trainers share the cells of an RL step.

Configured shares stay as they are. With `schedule.shares=measured` each trainer times its cells.
Trainer 0 fixes the shares of a step before any of its cells is shipped, and every rank reads them
from the control store.

The first shares come from the hardware profile. Sharded trainers keep those: their forwards are
collectives, in which every rank looks as slow as the slowest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from digenrl import accelerator
from digenrl.cluster.control import Control
from digenrl.cluster.world import World
from digenrl.record.run_dir import append_event
from digenrl.schedule import ScheduleSpec
from digenrl.schedule.speeds import adjusted_shares
from digenrl.types import TrainBatch

_WEIGHT = 0.2
"""Weight of a new measurement in a running mean."""
_FORGET_AFTER = 16
"""RL steps for which fixed shares are kept. No rank asks for older ones."""


class Shares:
    """The schedule of each RL step as its trainers share it.

    Args:
        timed: whether a trainer's own speed can be told (replicas).
    """

    def __init__(
        self, spec: ScheduleSpec, world: World, control: Control, run_dir: Path, timed: bool
    ) -> None:
        self._spec, self._world, self._control, self._run_dir = spec, world, control, run_dir
        self._timed = timed and spec.measured_shares
        self._fixed: dict[int, tuple[float, ...]] = {}
        self._seconds: float | None = None
        """Running mean of this trainer's seconds per cell."""
        self._began, self._cells = 0.0, 0

    def spec_at(self, step: int) -> ScheduleSpec:
        """Return the schedule with the shares of RL step `step`; wait until they are fixed."""
        if not self._spec.measured_shares:
            return self._spec
        if step not in self._fixed:
            text = self._control.wait_for(
                f"shares/{step}", f"trainer 0 to fix the shares of RL step {step}"
            )
            self._fixed[step] = tuple(float(share) for share in text.split(","))
            self._fixed.pop(step - _FORGET_AFTER, None)
        return replace(self._spec, shares=self._fixed[step])

    def begin_micro_batch(self, batch: TrainBatch) -> None:
        """Note that a micro-batch begins on this trainer."""
        self._began = time.perf_counter()
        self._cells = sum(block.samples * len(block.steps) for block in batch.blocks)

    def end_micro_batch(self) -> None:
        """Note that the micro-batch's gradients are there, and that nobody has been waited for."""
        if not self._timed or not self._cells:
            return
        if accelerator.device_count():  # the host runs ahead of the device, whose time is asked for
            torch.accelerator.synchronize()
        seconds = (time.perf_counter() - self._began) / self._cells
        known = seconds if self._seconds is None else self._seconds
        # Exponential mean; the first measurement counts alone.
        self._seconds = known + _WEIGHT * (seconds - known)

    def tell_speed(self) -> None:
        """Publish this trainer's measured seconds per cell."""
        if self._seconds is not None:
            self._control.set(f"cell_seconds/{self._world.rank}", repr(self._seconds))

    def fix_shares(self, version: int) -> None:
        """Fix the shares of every step that `version` generates for. Trainer 0 calls this before it
        sends the version, after a collective in which all trainers published their speeds."""
        if self._world.rank != 0 or not self._spec.measured_shares:
            return
        # With asynchrony the version also generates the head of the next step, whose cells need
        # owners.
        for step in range(version, version + self._spec.async_steps + 1):
            if step not in self._fixed:
                self._fixed[step] = self._next_shares(
                    self._fixed.get(step - 1, self._spec.shares), step
                )
            self._control.set(f"shares/{step}", ",".join(map(repr, self._fixed[step])))
        self._fixed.pop(version - _FORGET_AFTER, None)
        self._control.delete(f"shares/{version - _FORGET_AFTER}")

    def _next_shares(self, current: tuple[float, ...], step: int) -> tuple[float, ...]:
        texts = [self._control.get(f"cell_seconds/{rank}") for rank in range(self._world.trainers)]
        seconds = [float(text) for text in texts if text is not None]
        # Until every trainer has measured itself, nothing changes.
        shares = adjusted_shares(current, seconds) if len(seconds) == len(texts) else current
        if shares != current or step == 0:
            append_event(
                self._run_dir,
                "shares",
                {"rl_step": step, "shares": list(shares), "seconds_per_cell": seconds},
            )
        return shares

    def checkpoint_state(self, version: int) -> dict[str, list[float]]:
        """Return, for the checkpoint at the end of step `version` - 1, the shares that are fixed
        already."""
        return {str(step): list(shares) for step, shares in self._fixed.items() if step >= version}

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        """Undo `checkpoint_state`: a resumed run with as many trainers places these steps as the
        interrupted run would have."""
        fitting = {
            step: shares for step, shares in state.items() if len(shares) == self._world.trainers
        }
        self._fixed = {int(step): tuple(shares) for step, shares in fitting.items()}
