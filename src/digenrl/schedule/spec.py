"""What one RL step is, in numbers: the grid of design §1, cut into tasks, updates and micro-batches.

Invariants (tests state them by name):
  I2  every (sample, trained step) is trained exactly once;
  I3  denominators are the update's own, never a fragment's;
  I11 nothing here depends on rank, clock or speed: the same spec gives the same tasks everywhere.
Pure: standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ScheduleSpec:
    """Every number that the schedule needs. "Off" is a value: gap=0, tsp_batch=1, tsp_shard=False, tag=False, ..."""

    prompts: int
    """P, groups of a logical batch."""
    group_size: int
    """G, samples of a group."""
    task_size: int
    """b, samples of one rollout task; divides G. Part of the task, so the same in every schedule."""
    denoise_steps: int
    """T."""
    trained_steps: int
    """S, trained steps of a sample; 1..T."""
    updates_per_batch: int = 1
    """Optimizer updates per logical batch; group g belongs to update g // (P / updates)."""
    gap: int = 0
    """Groups of a fragment; 0 = one fragment is everything (the whole logical batch)."""
    order: Literal["canonical", "arrival"] = "canonical"
    """Order in which complete fragments are trained."""
    tsp_batch: int = 1
    """K, trained steps of a task in one forward."""
    tsp_shard: bool = False
    """Spread the steps of one task over trainer ranks."""
    tag: bool = False
    """Idle trainers may claim rollout tasks when the search predicts a gain."""
    handoff: bool = False
    """A task may be suspended at a denoising-step boundary and finished elsewhere."""
    shares: tuple[float, ...] = ()
    """Relative speed of each trainer rank; () = equal."""
    measured_shares: bool = False
    """`shares` are only the first ones: they follow the trainers' measured speed from step to step."""
    async_steps: int = 0
    """0 = on-policy, 1 = the first groups of the next batch may be one version old."""
    stale_fraction: float = 0.5
    """With async_steps=1: the first ceil(stale_fraction * P) groups of each batch use the previous version, always."""

    def __post_init__(self) -> None:
        def require(ok: bool, message: str) -> None:
            if not ok:
                raise ValueError(message)

        require(self.prompts >= 1, f"data.prompts_per_batch = {self.prompts}: use at least 1.")
        require(self.group_size >= 2, f"data.group_size = {self.group_size}: group advantages need at least 2 samples.")
        require(
            1 <= self.task_size <= self.group_size and self.group_size % self.task_size == 0,
            f"schedule.task_size = {self.task_size}: use a divisor of data.group_size = {self.group_size}.",
        )
        require(
            1 <= self.trained_steps <= self.denoise_steps,
            f"trained steps = {self.trained_steps}: use 1 .. {self.denoise_steps} (sampling.steps).",
        )
        require(
            self.updates_per_batch >= 1 and self.prompts % self.updates_per_batch == 0,
            f"algorithm.updates_per_batch = {self.updates_per_batch}: use a divisor of "
            f"data.prompts_per_batch = {self.prompts}.",
        )
        require(self.gap >= 0, f"schedule.gap = {self.gap}: use 0 (whole batch) or a number of groups.")
        require(self.tsp_batch >= 1, f"schedule.tsp.batch = {self.tsp_batch}: use at least 1.")
        require(self.async_steps in (0, 1), f"schedule.async_steps = {self.async_steps}: use 0 or 1.")
        require(0.0 <= self.stale_fraction <= 1.0, f"schedule.stale_fraction = {self.stale_fraction}: use 0 .. 1.")
        require(
            all(s >= 0 and math.isfinite(s) for s in self.shares) and (not self.shares or sum(self.shares) > 0),
            f"schedule.shares = {self.shares}: use non-negative numbers, at least one above 0.",
        )
        require(not self.measured_shares or min(self.shares, default=0) > 0, "measured shares start above 0.")

    @property
    def tasks_per_group(self) -> int:
        return self.group_size // self.task_size

    @property
    def tasks(self) -> int:
        """Tasks of one RL step."""
        return self.prompts * self.tasks_per_group

    @property
    def groups_per_update(self) -> int:
        return self.prompts // self.updates_per_batch

    @property
    def fragment_groups(self) -> int:
        """Groups of a (full) fragment; a fragment never crosses an update boundary."""
        return min(self.gap, self.groups_per_update) if self.gap else self.groups_per_update

    @property
    def blocks_per_task(self) -> int:
        """Cell blocks of a task: its S trained steps, K at a time."""
        return math.ceil(self.trained_steps / self.tsp_batch)

    @property
    def cells_per_update(self) -> int:
        """The loss denominator: (sample, trained step) cells of one optimizer update over all ranks."""
        return self.groups_per_update * self.group_size * self.trained_steps


@dataclass(frozen=True)
class Task:
    """One unit of generation: b samples of one group, from noise to reward."""

    step: int
    index: int
    """Number within the step, group-first: group * tasks_per_group + part."""
    group: int
    first_sample: int
    samples: int
    version: int
    """The weight version that must generate it (I8: fixed before anybody claims it)."""
