"""Seconds of training, from the placement that the runtime uses."""

from __future__ import annotations

from digenrl.schedule import ScheduleSpec, place
from digenrl.simulate.cluster import Cluster


def train_seconds(
    spec: ScheduleSpec, cluster: Cluster, fragment: tuple[int, ...], ranks: tuple[int, ...]
) -> tuple[float, ...]:
    """Seconds of training `fragment` on each of `ranks` (launch ranks of trainers); collectives hold sharded ranks
    together, so there every micro-batch takes as long as its slowest rank."""
    placement = place(spec, len(cluster.trainers), fragment)
    rows = []
    for rank in ranks:
        cell = cluster.trainers[rank].cell_seconds
        rows.append([cell * sum(len(block.steps) for block in micro) for micro in placement[rank]])
    common = cluster.micro_batch_seconds
    if cluster.lockstep:
        whole = sum(max(column) + common for column in zip(*rows, strict=True))
        return (whole,) * len(ranks)
    return tuple(sum(row) + common * len(row) for row in rows)
