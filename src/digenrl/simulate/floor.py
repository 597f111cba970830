"""Seconds per RL step that no run of a candidate beats: what lets the planner skip simulating it.

The work of each role over its speed, in whole micro-batches; lending fills every wait, publishing and delivery are
free, and a step of one-step asynchrony overlaps with its neighbours completely.
"""

from __future__ import annotations

import math

from digenrl.schedule import ScheduleSpec
from digenrl.simulate.virtual_cluster import Cluster


def floor_seconds(spec: ScheduleSpec, cluster: Cluster) -> float:
    """Lower bound of seconds per step of `spec` on `cluster`."""
    fragment, update = training_floor(spec, cluster)
    training = spec.updates_per_batch * (update + cluster.reduce_seconds + cluster.optimizer_seconds)
    training += cluster.snapshot_seconds
    makers = cluster.rollouts or cluster.trainers
    rate = sum(1.0 / rank.task_seconds(spec.denoise_steps) for rank in makers)
    making = spec.tasks / rate
    if not cluster.rollouts:
        return making + training
    if spec.tag:
        lending = sum(1.0 / rank.task_seconds(spec.denoise_steps) for rank in cluster.trainers)
        making = (spec.tasks + lending * training) / (rate + lending)
    if spec.async_steps:
        return max(making, training)
    everyone = cluster.ranks if spec.tag else cluster.rollouts
    first = min(rank.task_seconds(spec.denoise_steps) for rank in everyone)
    return max(making if spec.tag else making + fragment, training + first)


def training_floor(spec: ScheduleSpec, cluster: Cluster) -> tuple[float, float]:
    """Seconds of training one fragment (0 where a rank without blocks of it trains others) and all of an update."""
    trainers, tasks = len(cluster.trainers) // spec.context, spec.tasks_per_group
    cells = [rank.cell_seconds for rank in cluster.trainers]
    steps = spec.trained_steps / spec.blocks_per_task
    useful = (
        cluster.useful if spec.task_size > 1 else round(tasks * cluster.useful) / tasks
    )  # tasks of one sample, whole
    if spec.shares or not spec.tsp_shard:
        speed = sum(1.0 / cell for cell in cells) / spec.context
        return 0.0, useful * spec.groups_per_update * tasks * spec.trained_steps / speed
    per_group, common = math.floor(useful * tasks * spec.blocks_per_task + 1e-9), cluster.micro_batch_seconds
    if not cluster.lockstep:  # odd blocks go round the ranks from fragment to fragment
        return 0.0, math.ceil(spec.groups_per_update * per_group / trainers) * (steps * min(cells) + common)

    def together(groups: int) -> float:
        """Full rounds last as long as the slowest rank's block; what is left over may be the fastest's."""
        full, odd = divmod(groups * per_group, trainers)
        return full * (steps * max(cells) + common) + (odd > 0) * (steps * min(cells) + common)

    whole, rest = divmod(spec.groups_per_update, spec.fragment_groups)
    return together(spec.fragment_groups), whole * together(spec.fragment_groups) + together(rest)
