"""Lower bound of a candidate's seconds per RL step, with which the planner skips many simulations.

The bound is the work of each role divided by its speed, in whole micro-batches. It assumes that
lending fills every wait. Publishing and delivery are free. One-step asynchrony overlaps
neighbouring steps completely.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence

from digenrl.extensions.planner.virtual_cluster import (
    Cluster,
    Training,
    placed_seconds,
    placement_spec,
)
from digenrl.schedule import ScheduleSpec, update_fragments
from digenrl.schedule.order import stale_groups


def floor_seconds(spec: ScheduleSpec, cluster: Cluster) -> float:
    """Return a lower bound of the seconds per RL step of `spec` on `cluster`."""
    fragment, updates = training_floor(spec, cluster)
    updates = [seconds + cluster.reduce_seconds + cluster.optimizer_seconds for seconds in updates]
    training = sum(updates) + cluster.snapshot_seconds
    later = sum(
        sorted(updates)[: spec.slices - 1]
    )  # further updates of the same groups need all groups complete
    last = (
        fragment + later if spec.gap else training
    )  # at least this much is left to train after the last task
    if not cluster.rollouts:
        own = [rank.task_seconds(spec.denoise_steps) for rank in cluster.trainers]
        return training + (
            spec.tasks / _combined_rate(own) if spec.gap else _makespan(spec.tasks, own)
        )
    making = [rank.task_seconds(spec.denoise_steps) for rank in cluster.rollouts]
    lending = (
        [rank.task_seconds(spec.denoise_steps) for rank in cluster.trainers] if spec.tag else []
    )
    everyone = making + lending
    overlapped = (spec.tasks + _combined_rate(lending) * training) / _combined_rate(everyone)
    if not spec.async_steps:  # while trainers train what the last task completed, rollouts idle
        overlapped += last * _combined_rate(making) / _combined_rate(everyone)
    # Tasks that cannot begin before the newest version is there.
    fresh = spec.tasks - stale_groups(spec, 1) * spec.tasks_per_group
    alone = _makespan(fresh, everyone) + last
    return max(overlapped, alone, training + (0.0 if spec.async_steps else min(everyone)))


def _combined_rate(seconds: Sequence[float]) -> float:
    return sum(1.0 / own for own in seconds)


def _makespan(tasks: int, seconds: Sequence[float]) -> float:
    """Return the shortest time in which ranks finish `tasks` whole tasks.

    Rank i takes `seconds[i]` per task, and all ranks are free at 0.
    """
    if not tasks:
        return 0.0
    alike = Counter(own for own in seconds if math.isfinite(own))
    low = tasks / _combined_rate(seconds)
    high = low + max(alike)
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        done = sum(count * math.floor(middle / own) for own, count in alike.items())
        low, high = (low, middle) if done >= tasks else (middle, high)
    return low


def busiest_seconds(spec: ScheduleSpec, cluster: Cluster) -> float:
    """Return another lower bound of the seconds per RL step: those of the trainer with the most to
    train. This bound is the tighter one if trainers without collectives get uneven parts."""
    updates = training_floor(spec, cluster, placed=True)[1]
    after = cluster.reduce_seconds + cluster.optimizer_seconds
    return sum(updates) + len(updates) * after + cluster.snapshot_seconds


def training_floor(
    spec: ScheduleSpec, cluster: Cluster, placed: bool = False
) -> tuple[float, list[float]]:
    """Return the seconds of training the shortest fragment, and the seconds of each update.

    The first number is 0 where a fragment may have nothing to train. `placed` counts the blocks of
    every rank, which takes milliseconds and is always done for collectives.
    """
    if cluster.lockstep or placed:
        lasting = _fragment_seconds(
            placement_spec(spec), cluster.training, cluster.units, cluster.useful
        )
        longest = min(max(units) for update in lasting for units in update)
        return longest, [max(map(sum, zip(*update, strict=True))) for update in lasting]
    trainers, tasks = len(cluster.trainers), spec.tasks_per_portion
    steps = spec.trained_steps / spec.blocks_per_task
    blocks = [steps * rank.cell_seconds + rank.exposed_seconds for rank in cluster.trainers]
    useful = (
        cluster.useful if spec.task_size > 1 else round(tasks * cluster.useful) / tasks
    )  # tasks of one sample, whole
    shortest = spec.groups_per_update % spec.fragment_groups or spec.fragment_groups
    fewest = shortest * tasks * spec.blocks_per_task
    if useful < 1.0 or spec.selects:
        fewest = 0
    if spec.shares or not spec.tsp_shard:
        speed = sum(1.0 / block for block in blocks)
        each = useful * spec.groups_per_update * tasks * spec.blocks_per_task / speed
        return fewest / speed, [each] * spec.updates_per_batch
    per_group = math.floor(useful * tasks * spec.blocks_per_task + 1e-9)
    # Odd blocks go round the ranks from fragment to fragment, and so does what is not useful.
    each = math.ceil(spec.groups_per_update * per_group / trainers) * min(blocks)
    if useful == 1.0:
        whole, rest = divmod(spec.groups_per_update, spec.fragment_groups)
        full = whole * (spec.fragment_groups * per_group // trainers) + rest * per_group // trainers
        each = max(each, full * max(blocks))
    return math.ceil(fewest / trainers) * min(blocks), [each] * spec.updates_per_batch


@functools.lru_cache(maxsize=1024)
def _fragment_seconds(
    spec: ScheduleSpec, training: Training, units: Sequence[Sequence[int]], useful: float
) -> list[list[list[float]]]:
    """Return the seconds of each fragment of each update on each unit of trainers. A micro-batch
    takes as long as on its slowest rank."""

    def unit_seconds(fragment: tuple[int, ...]) -> list[float]:
        table = placed_seconds(spec, training, useful, fragment)
        rows = ({table[rank] for rank in ranks} for ranks in units)
        return [sum([max(column) for column in zip(*own, strict=True)]) for own in rows]

    return [
        [unit_seconds(fragment) for fragment in update_fragments(spec, update)]
        for update in range(spec.updates_per_batch)
    ]
