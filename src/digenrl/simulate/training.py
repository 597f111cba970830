"""Seconds of training, from the placement that the runtime uses."""

from __future__ import annotations

from digenrl.schedule import ScheduleSpec, place
from digenrl.simulate.cluster import Cluster


def train_seconds(
    spec: ScheduleSpec, cluster: Cluster, fragment: tuple[int, ...], ranks: tuple[int, ...]
) -> tuple[float, ...]:
    """Seconds of training `fragment` on each of `ranks` (launch ranks of trainers); collectives hold sharded ranks
    together, so there every micro-batch takes as long as its slowest rank. A replica without blocks of the fragment
    runs one at weight zero, as `strategy.cells.StepBoard` gives it."""
    placement = place(spec, len(cluster.trainers), fragment)
    rows = []
    for rank in ranks:
        cell = cluster.trainers[rank].cell_seconds
        rows.append([cell * sum(len(block.steps) for block in micro) for micro in placement[rank]])
    common = cluster.micro_batch_seconds
    if cluster.lockstep:
        whole = sum(max(column) + common for column in zip(*rows, strict=True))
        return (whole,) * len(ranks)
    filler = min(spec.tsp_batch, spec.trained_steps)
    return tuple(
        (sum(row) or filler * cluster.trainers[rank].cell_seconds) + common * len(row)
        for rank, row in zip(ranks, rows, strict=True)
    )
