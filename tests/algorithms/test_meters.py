"""Metrics over unequal micro-batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from digenrl.algorithms.meters import Meters


def test_mean_over_unequal_micro_batches_is_the_mean_over_cells() -> None:
    meters, values = Meters(), torch.arange(10.0)
    for part in (values[:7], values[7:9], values[9:]):
        meters.update("x", part.sum(), len(part))
        meters.update_peak("high", part.max(), len(part))
    found = meters.collect_metrics()
    assert float(found["x"]) == 4.5
    assert float(found["high"]) == 9.0
    assert meters.collect_metrics() == {}
    naive = torch.stack([values[:7].mean(), values[7:9].mean(), values[9:].mean()]).mean()
    assert float(naive) != 4.5  # what a mean of means would report


def test_ranks_with_unequal_counts_agree_on_the_mean() -> None:
    """A rank without cells knows the names with count 0, or not at all."""
    sent: list[list[Tensor]] = []

    def exchange(mine: Tensor, group: object) -> list[Tensor]:
        """Stands for the network: keeps what a rank sends, and answers with what both have sent in
        that place."""
        sent[-1].append(mine)
        return [rank[len(sent[-1]) - 1] for rank in sent]

    def rank(has_cells: bool, idle: bool = False) -> dict[str, float]:
        meters = Meters(dist_sync_fn=exchange, distributed_available_fn=lambda: True)
        if not idle:
            meters.update("x", torch.tensor(6.0 if has_cells else 0.0), 3 if has_cells else 0)
            meters.update_peak(
                "high", torch.tensor(0.25 if has_cells else 9.0), 3 if has_cells else 0
            )  # 9.0: a masked block's
        meters.update("nobody", torch.tensor(0.0), 0)
        meters.update_peak("none", torch.tensor(1.0), 0)
        sent.append([])
        return {name: float(value) for name, value in meters.collect_metrics().items()}

    rank(has_cells=True)
    assert rank(has_cells=False) == {"x": 2.0, "high": 0.25}
    sent.clear()
    rank(has_cells=False)
    assert rank(has_cells=True) == {"x": 2.0, "high": 0.25}
    sent.clear()
    rank(has_cells=True)
    assert rank(has_cells=False, idle=True) == {"x": 2.0, "high": 0.25}


def test_a_rank_that_has_nothing_to_add_reports_the_new_step_and_not_the_last() -> None:
    sent: list[list[Tensor]] = []

    def exchange(mine: Tensor, group: object) -> list[Tensor]:
        sent[-1].append(mine)
        return [rank[len(sent[-1]) - 1] for rank in sent]

    busy, idle = (
        Meters(dist_sync_fn=exchange, distributed_available_fn=lambda: True) for _ in range(2)
    )
    for total, count, own, wanted in ((6.0, 3, 2.0, 2.0), (8.0, 2, None, 4.0)):
        sent[:] = [[]]
        busy.update("x", torch.tensor(total), count)
        busy.collect_metrics()
        sent.append([])
        if own is not None:
            idle.update("x", torch.tensor(own), 1)
        assert {name: float(value) for name, value in idle.collect_metrics().items()} == {
            "x": wanted
        }
