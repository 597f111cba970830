"""Metrics of one RL step that are right when micro-batches and ranks hold unequal numbers of cells."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

NOTHING = -1.0
"""Below every peak."""


class Meters:
    """Sums with their counts, and peaks, until `collect` reduces them over all ranks with one gather.

    Every rank must use the same names; a rank without cells uses them with count 0.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, float]] = {}
        self._peaks: dict[str, Tensor] = {}

    def mean(self, name: str, total: Tensor, count: float) -> None:
        """Add `total`, a sum over `count` things; the metric is the quotient of both sums over the RL step."""
        known, counted = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (total.detach().double() + known, count + counted)

    def peak(self, name: str, value: Tensor, count: float) -> None:
        """The metric is the largest `value` (>= 0) that came with a count above 0."""
        known = self._peaks.get(name, torch.full_like(value, NOTHING, dtype=torch.float64))
        self._peaks[name] = torch.maximum(known, value.detach().double()) if count > 0 else known

    def collect(self, gather: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """name -> fp32 scalar over all ranks, equal on all of them; names nobody counted are left out. Empties the
        meters.

        gather: tensor [n] -> [ranks, n], or [n] for one rank (Lightning's `all_gather`).
        """
        sums, peaks = sorted(self._sums), sorted(self._peaks)
        if not sums and not peaks:
            return {}
        values = [self._sums[name][0] for name in sums] + [self._peaks[name] for name in peaks]
        counts = torch.tensor([self._sums[name][1] for name in sums], dtype=torch.float64, device=values[0].device)
        packed = torch.cat([counts, torch.stack(values)])
        rows = gather(packed).reshape(-1, packed.numel())
        n = len(sums)
        counted, totals = rows[:, :n].sum(dim=0), rows[:, n : 2 * n].sum(dim=0)
        found = {
            name: (total / count).float() for name, total, count in zip(sums, totals, counted, strict=True) if count > 0
        }
        highest = rows[:, 2 * n :].amax(dim=0)
        found |= {name: value.float() for name, value in zip(peaks, highest, strict=True) if value > NOTHING}
        self._sums, self._peaks = {}, {}
        return found
