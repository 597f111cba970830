"""Settings of the schedule that have no effect with the settled allocation and the other
settings."""

from __future__ import annotations

from collections.abc import Iterator

from digenrl.config.settings import Settings
from digenrl.schedule import slices_of_group


def without_effect(settings: Settings) -> Iterator[str]:
    """Yield a line for each setting of the settled `settings` that has no effect."""
    schedule, trainers, rollouts = (
        settings.schedule,
        settings.allocation.trainers,
        settings.allocation.rollouts,
    )
    updates = settings.algorithm.updates_per_batch
    # Portions of an update, which are what `schedule.gap` counts.
    groups = (
        settings.data.groups_per_step
        * slices_of_group(settings.data.updates_split, updates)
        // updates
    )
    shares = settings.node_at("schedule.shares")  # as the user wrote them
    idle = "schedule.{}: has no effect here, because {}.".format
    if schedule.tag and rollouts == 0:
        yield idle("tag = true", "colocated ranks take turns at generating and training")
    if schedule.tsp.shard and trainers == 1:
        yield idle("tsp.shard = true", "only one rank trains")
    if schedule.gap > groups:
        yield idle(
            f"gap = {schedule.gap}", f"an update has {groups} groups: it is the same as {groups}"
        )
    if schedule.shares != "equal" and trainers == 1:
        yield idle(f"shares = {shares}", "only one rank trains")
    elif schedule.shares == "measured" and settings.parallel.sharding != "ddp":
        yield (
            "schedule.shares = measured: has no effect beyond the profile's speeds, because under "
            f"{settings.parallel.sharding} trainers compute each forward together and cannot be "
            "timed apart."
        )
    elif schedule.shares != "equal" and settings.parallel.sharding == "fsdp":
        yield (
            f"schedule.shares = {shares}: has no effect on predicted times, because under "
            "fsdp they take each forward as one of all trainers."
        )
    if schedule.async_steps and schedule.stale_fraction == 0:
        yield idle("async_steps = 1", "schedule.stale_fraction=0 lets no group use older weights")
