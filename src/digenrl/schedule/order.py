"""GAP: the order of tasks (group-first), and fragments of complete groups.

Tasks are queued *by the version that generates them*: queue(v) = the fresh groups of step v, then the stale groups of
step v+1 (one-step asynchrony). A free rank that holds version v claims the next number of queue(v); when the queue is
empty it waits for version v+1. With async_steps=0 queue(v) is simply step v.

Invariants: I7 one trajectory, one version; I8 one group, one version, fixed by (step, group) alone;
I9 a consumed version is never older than the trainer's minus one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from digenrl.schedule.spec import ScheduleSpec, Task


def stale_groups(spec: ScheduleSpec, step: int, first_step: int = 0) -> int:
    """How many leading groups of `step` use version step-1. Never any in the first step of a run's history."""
    if spec.async_steps == 0 or step <= first_step:
        return 0
    return math.ceil(spec.stale_fraction * spec.prompts)


def group_version(spec: ScheduleSpec, step: int, group: int) -> int:
    """Version that generates `group` of `step`: step-1 for the stale head, else step (I8)."""
    return step - 1 if group < stale_groups(spec, step) else step


def group_tasks(spec: ScheduleSpec, step: int, group: int) -> tuple[Task, ...]:
    """The tasks of one group, in sample order."""
    version = group_version(spec, step, group)
    return tuple(
        Task(step, group * spec.tasks_per_group + part, group, part * spec.task_size, spec.task_size, version)
        for part in range(spec.tasks_per_group)
    )


def queue(spec: ScheduleSpec, version: int, last_step: int) -> tuple[Task, ...]:
    """Every task that version `version` generates, in claim order. `last_step` is the run's final RL step."""
    fresh = range(stale_groups(spec, version), spec.prompts) if version <= last_step else range(0)
    tasks = [task for group in fresh for task in group_tasks(spec, version, group)]
    if version + 1 <= last_step:
        tasks += [t for g in range(stale_groups(spec, version + 1)) for t in group_tasks(spec, version + 1, g)]
    return tuple(tasks)


def resumed_queue(spec: ScheduleSpec, step: int) -> tuple[Task, ...]:
    """What a run resumed at `step` generates first, with the previous version: the stale head of `step`."""
    return tuple(task for group in range(stale_groups(spec, step)) for task in group_tasks(spec, step, group))


def update_of(spec: ScheduleSpec, portion: int) -> int:
    """Optimizer update that trains `portion` (of a group: its first one): fixed, whatever arrives first."""
    return portion // spec.groups_per_update


def fragments(spec: ScheduleSpec, update: int) -> tuple[tuple[int, ...], ...]:
    """Return the portions of each fragment of an update, fixed so that producers know every cell's owner beforehand."""
    first = update * spec.groups_per_update
    portions = range(first, first + spec.groups_per_update)
    size = spec.fragment_groups
    return tuple(tuple(portions[i : i + size]) for i in range(0, len(portions), size))


def later_fragments(spec: ScheduleSpec, update: int) -> tuple[tuple[int, ...], ...]:
    """The fragments of the updates of a batch that follow `update`."""
    return tuple(f for later in range(update + 1, spec.updates_per_batch) for f in fragments(spec, later))


def next_fragment(
    spec: ScheduleSpec, pending: Sequence[tuple[int, ...]], completed: AbstractSet[int]
) -> tuple[int, ...] | None:
    """Return the first fragment of `pending` once its groups are among the step's `completed` ones; else None.

    With gap=0 the whole logical batch is one fragment: nothing is trained before every group is complete, also with
    several updates per batch.
    """
    needed = spec.groups_of(pending[0]) if spec.gap else range(spec.prompts)
    return pending[0] if completed >= {*needed} else None
