"""Seconds of training, from the placement that the runtime uses."""

from __future__ import annotations

from digenrl.schedule import ScheduleSpec, place
from digenrl.simulate.virtual_cluster import Cluster


def train_seconds(spec: ScheduleSpec, cluster: Cluster, fragment: tuple[int, ...]) -> tuple[float, ...]:
    """Seconds of training `fragment` on each trainer; collectives hold sharded ranks together, so there every
    micro-batch takes as long as its slowest rank. A replica without blocks of the fragment runs one at weight zero, as
    `strategy.cells.StepBoard` gives it."""
    trainers, common = cluster.trainers, cluster.micro_batch_seconds
    rows = [
        [rank.cell_seconds * sum(len(block.steps) for block in micro) for micro in own]
        for rank, own in zip(trainers, place(spec, len(trainers), fragment), strict=True)
    ]
    if cluster.lockstep:
        whole = sum(max(column) + common for column in zip(*rows, strict=True))
        return (whole,) * len(trainers)
    filler = min(spec.tsp_batch, spec.trained_steps)
    return tuple(
        (sum(row) or filler * rank.cell_seconds) + common * len(row) for rank, row in zip(trainers, rows, strict=True)
    )
