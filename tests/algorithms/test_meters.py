"""Metrics over unequal micro-batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from digenrl.algorithms.meters import Meters


def test_mean_over_unequal_micro_batches_is_the_mean_over_cells() -> None:
    meters, values = Meters(), torch.arange(10.0)
    for part in (values[:7], values[7:9], values[9:]):
        meters.mean("x", part.sum(), len(part))
        meters.peak("high", part.max(), len(part))
    found = meters.collect(lambda packed: packed)
    assert float(found["x"]) == 4.5
    assert float(found["high"]) == 9.0
    assert meters.collect(lambda packed: packed) == {}
    naive = torch.stack([values[:7].mean(), values[7:9].mean(), values[9:].mean()]).mean()
    assert float(naive) != 4.5  # what a mean of means would report


def test_ranks_with_unequal_counts_agree_on_the_mean() -> None:
    """A rank without cells uses the same names with count 0."""
    ranks, packed = [Meters(), Meters()], []
    ranks[0].mean("x", torch.tensor(6.0), 3)
    ranks[1].mean("x", torch.tensor(0.0), 0)
    ranks[0].peak("high", torch.tensor(0.25), 3)
    ranks[1].peak("high", torch.tensor(9.0), 0)  # masked: it belongs to a block of weight 0
    for rank in ranks:
        rank.mean("nobody", torch.tensor(0.0), 0)
        rank.peak("none", torch.tensor(1.0), 0)

    def remember(value: Tensor) -> Tensor:
        packed.append(value)
        return value

    probes = [Meters(), Meters()]
    for probe, rank in zip(probes, ranks, strict=True):
        probe.__dict__.update(rank.__dict__)
        probe.collect(remember)
    for rank in ranks:
        found = rank.collect(lambda _: torch.stack(packed))
        assert {name: float(value) for name, value in found.items()} == {"x": 2.0, "high": 0.25}
