"""The shape of one RL step in numbers: the grid of design §1, cut into tasks, updates and
micro-batches.

A *portion* is what one optimizer update trains of one group: the whole group, or the update's share
of its samples. Portions are numbered update by update, so the first portion of a group has the
group's number. Fragments consist of portions.

Invariants, which tests state by name:
1. I2: every (sample, trained step) is trained exactly once.
2. I3: denominators are the update's own, never a fragment's.
3. I11: nothing here depends on rank, clock or speed. The same spec gives the same tasks everywhere.

Pure: standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


def steps_per_forward(asked: int | str, trained: int) -> int:
    """Return K of `schedule.tsp.batch`: at most the `trained` steps, and all of them for "auto" and
    "all"."""
    return trained if isinstance(asked, str) else min(asked, trained)


def groups_of_step(data: Mapping[str, Any]) -> int:
    """Return how many groups an RL step generates at most, from the `data` group of a
    configuration.

    The configuration of an old run may lack `oversample`.
    """
    return int(data["prompts_per_batch"]) + int(data.get("oversample", 0))


def slices_of_group(updates_split: str, updates: int) -> int:
    """Return the number of portions of a group, from `data.updates_split` and
    `algorithm.updates_per_batch`."""
    return updates if updates_split == "samples" else 1


@dataclass(frozen=True)
class ScheduleSpec:
    """Every number that the schedule needs. "Off" is a value: gap=0, tsp_batch=1, tsp_shard=False,
    tag=False, ...

    A new key needs a field here, a row of `KEYS`, a field of `digenrl.config.settings` and a
    line of configs/schedule/sync.yaml.
    """

    prompts: int
    """P, groups of a logical batch, including those generated beyond what is trained."""
    group_size: int
    """G, samples of a group."""
    task_size: int
    """b, samples of one rollout task; divides G and is the same in every schedule."""
    denoise_steps: int
    """T, denoising steps of a sample."""
    trained_steps: int
    """S, trained steps of a sample; 1..T."""
    updates_per_batch: int = 1
    """Optimizer updates per logical batch."""
    updates_split: Literal["groups", "samples"] = "groups"
    """What the updates of a batch divide among them, in canonical order: its groups, or the samples
    of every group."""
    gap: int = 0
    """Groups of a fragment; 0 = the whole logical batch is one fragment."""
    tsp_batch: int = 1
    """K, trained steps of a task in one forward."""
    tsp_shard: bool = False
    """Whether the steps of one task are spread over trainer ranks."""
    tag: bool = False
    """Whether idle trainers may claim rollout tasks when the search predicts a gain."""
    shares: tuple[float, ...] = ()
    """Relative speed of each trainer rank; () = equal."""
    measured_shares: bool = False
    """Whether `shares` are only the first ones, and then follow the trainers' measured speed from
    step to step."""
    oversample: int = 0
    """Groups of `prompts` that are generated beyond what is trained. The first groups that teach
    something are trained."""
    zero_variance_groups: Literal["keep", "drop"] = "keep"
    """Treatment of groups whose samples all score alike: they count in the loss's denominator
    ("keep"), or not ("drop")."""
    context: int = 1
    """Neighbouring trainers that share the tokens of each trained forward, and so train the same
    cells together."""
    skip_zero: bool = True
    """Whether cells whose gradient is known to be zero are left out of training."""
    async_steps: int = 0
    """Steps of asynchrony: 0 = on-policy, 1 = the first groups of the next batch may be one version
    old."""
    stale_fraction: float = 0.5
    """Part of each batch, at its head, that uses the previous version when async_steps=1:
    ceil(stale_fraction * P) groups."""

    def override_words(self) -> list[str]:
        """Return the command-line words that set `schedule.*` to this schedule. Shares are in units
        of the smallest above 0."""
        words = {
            key: getattr(self, name) for name, key in KEYS.items() if key.startswith("schedule.")
        }
        # In units of the smallest share: 0.5, 1.0 become 1, 2.
        slowest = min((share for share in self.shares if share), default=1.0)
        relative = ",".join(f"{share / slowest:.3g}" for share in self.shares)
        words["schedule.shares"] = f"[{relative}]" if self.shares else "equal"
        words["schedule.stale_fraction"] = f"{self.stale_fraction:g}"
        return [f"{key}={str(value).lower()}" for key, value in words.items()]

    def __post_init__(self) -> None:
        trained, updates = self.prompts - self.oversample, self.updates_per_batch
        # Updates that divide the samples share all groups. Only updates that divide the groups need
        # whole groups each.
        whole = updates // self.slices
        if self.group_size % self.task_size or trained % whole or self.oversample % whole:
            raise ValueError(
                f"sampling.task_size = {self.task_size} must divide data.group_size = "
                f"{self.group_size}, and "
                f"algorithm.updates_per_batch = {updates} both data.prompts_per_batch = {trained} "
                "and data.oversample "
                f"= {self.oversample}."
            )
        if self.tasks_per_group % self.slices:
            raise ValueError(
                f"data.updates_split = samples: algorithm.updates_per_batch = {updates} must "
                "divide the "
                f"{self.tasks_per_group} tasks of a group, data.group_size = {self.group_size} "
                "over sampling.task_size "
                f"= {self.task_size}."
            )

    @property
    def tasks_per_group(self) -> int:
        return self.group_size // self.task_size

    @property
    def tasks(self) -> int:
        """Tasks of one RL step."""
        return self.prompts * self.tasks_per_group

    @property
    def slices(self) -> int:
        """Number of portions of a group."""
        return slices_of_group(self.updates_split, self.updates_per_batch)

    @property
    def groups_per_update(self) -> int:
        return self.prompts * self.slices // self.updates_per_batch

    @property
    def tasks_per_portion(self) -> int:
        return self.tasks_per_group // self.slices

    def groups_of(self, fragment: Sequence[int]) -> list[int]:
        """Return the group of each portion of a fragment."""
        return [portion % self.prompts for portion in fragment]

    def parts_of(self, portion: int) -> range:
        """Return the task numbers, within their group, that belong to a portion.

        Example:
            >>> # 4 groups of 6 tasks. Portions 1 and 5 are the halves of group 1.
            >>> spec = ScheduleSpec(4, 6, 1, 4, 3, updates_per_batch=2, updates_split="samples")
            >>> spec.parts_of(1), spec.parts_of(5)
            (range(0, 3), range(3, 6))
        """
        first = portion // self.prompts * self.tasks_per_portion
        return range(first, first + self.tasks_per_portion)

    def portion_of(self, group: int, part: int) -> int:
        """Return the portion that task `part` of `group` belongs to."""
        return part // self.tasks_per_portion * self.prompts + group

    @property
    def places(self) -> int:
        """Most groups of an optimizer update that are trained."""
        return self.groups_per_update - self.oversample * self.slices // self.updates_per_batch

    @property
    def selects(self) -> bool:
        """Whether groups that teach nothing are left out."""
        return self.oversample > 0 or self.zero_variance_groups != "keep"

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
        """The loss denominator: (sample, trained step) cells of one optimizer update over all
        ranks."""
        return self.places * self.group_size // self.slices * self.trained_steps


KEYS = {
    "group_size": "data.group_size",
    "task_size": "sampling.task_size",
    "denoise_steps": "sampling.steps",
    "updates_per_batch": "algorithm.updates_per_batch",
    "updates_split": "data.updates_split",
    "gap": "schedule.gap",
    "tsp_batch": "schedule.tsp.batch",
    "tsp_shard": "schedule.tsp.shard",
    "tag": "schedule.tag",
    "shares": "schedule.shares",
    "oversample": "data.oversample",
    "zero_variance_groups": "data.zero_variance_groups",
    "context": "parallel.context",
    "skip_zero": "schedule.skip_zero",
    "async_steps": "schedule.async_steps",
    "stale_fraction": "schedule.stale_fraction",
}
"""Field of ScheduleSpec -> key of the configuration."""


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
    """Weight version that must generate the task (I8: fixed before any rank claims it)."""
