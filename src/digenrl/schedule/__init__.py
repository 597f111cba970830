"""The schedule of one RL step, as pure functions and state machines that runtime and simulator
share. Standard library only."""

from digenrl.schedule.order import (
    group_tasks,
    group_version,
    next_fragment,
    resumed_queue,
    update_fragments,
    update_of,
    version_queue,
)
from digenrl.schedule.spec import (
    ScheduleSpec,
    Task,
    groups_of_step,
    slices_of_group,
    steps_per_forward,
)
from digenrl.schedule.timesteps import Placement, micro_batches_per_update, place_fragment

__all__ = [
    "Placement",
    "ScheduleSpec",
    "Task",
    "group_tasks",
    "group_version",
    "groups_of_step",
    "micro_batches_per_update",
    "next_fragment",
    "place_fragment",
    "resumed_queue",
    "slices_of_group",
    "steps_per_forward",
    "update_fragments",
    "update_of",
    "version_queue",
]
