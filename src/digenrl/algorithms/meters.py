"""Metrics of one RL step that are right when micro-batches and ranks hold unequal numbers of cells,
or none."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

NOTHING = -1.0
"""Below every peak."""


class Meters(Metric):
    """Sums with their counts, and peaks, until `collect_metrics`. A rank without cells need not
    know the names.

    One torchmetrics object for all names: a metric per name would cost some sixty collectives in
    every RL step.
    """

    sums: Tensor
    """[names, 2]: (total, count)."""
    peaks: Tensor
    """[names]."""

    def __init__(self, **options: object) -> None:
        super().__init__(**({"dist_sync_fn": gather_all_tensors} | options))
        self.add_state("sums", torch.zeros(0, 2, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("peaks", torch.zeros(0, dtype=torch.float64), dist_reduce_fx="max")
        self._sums: dict[str, tuple[Tensor, float]] = {}
        self._peaks: dict[str, Tensor] = {}

    def update(self, name: str, total: Tensor, count: float) -> None:
        """Add `total`, a sum over `count` things; the metric is the quotient of both sums over the
        RL step."""
        known, counted = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (total.detach().double() + known, count + counted)

    def update_peak(self, name: str, value: Tensor, count: float) -> None:
        """Add a `value` (>= 0); the metric is the largest value that came with a count above 0."""
        known = self._peaks.get(name, torch.full_like(value, NOTHING, dtype=torch.float64))
        self._peaks[name] = torch.maximum(known, value.detach().double()) if count > 0 else known

    def compute(self) -> dict[str, Tensor]:
        """Return name -> fp32 scalar; names nobody counted are left out."""
        means = zip(sorted(self._sums), *self.sums.unbind(1), strict=True)
        found = {name: (total / count).float() for name, total, count in means if count > 0}
        peaks = zip(sorted(self._peaks), self.peaks, strict=True)
        return found | {name: value.float() for name, value in peaks if value > NOTHING}

    def collect_metrics(self) -> dict[str, Tensor]:
        """Return `compute` over all ranks, equal on all of them. Empties the meters."""
        # States are reduced by position, so all ranks need the same names in the same order.
        self._agree_on_names()
        if not self._sums:
            return {}
        totals = torch.stack([self._sums[name][0] for name in sorted(self._sums)])
        self.sums = torch.stack(
            [totals, totals.new_tensor([self._sums[name][1] for name in sorted(self._sums)])], 1
        )
        # The zero keeps `stack` from an empty list where there are no peaks, and is cut off again.
        self.peaks = torch.stack(
            [totals.new_zeros(()), *(self._peaks[name] for name in sorted(self._peaks))]
        )[1:]
        found: dict[str, Tensor] = self.compute()
        self.reset()
        return found

    def _agree_on_names(self) -> None:
        """Give every rank the names of all ranks, with a count of zero for names that it lacks."""
        if not self.distributed_available_fn():
            return
        own = "\n".join(
            [*(f"sum {name}" for name in self._sums), *(f"peak {name}" for name in self._peaks)]
        )
        # Only tensors can be gathered, so the names travel as bytes, of unequal length.
        letters = torch.tensor(list(own.encode()), dtype=torch.uint8, device=self.device)
        for others in self.dist_sync_fn(letters, None):
            for line in bytes(others.tolist()).decode().splitlines():
                kind, _, name = line.partition(" ")
                if kind == "sum":
                    self._sums.setdefault(
                        name, (torch.zeros((), dtype=torch.float64, device=self.device), 0.0)
                    )
                else:
                    self._peaks.setdefault(
                        name, torch.tensor(NOTHING, dtype=torch.float64, device=self.device)
                    )

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._sums, self._peaks = {}, {}
