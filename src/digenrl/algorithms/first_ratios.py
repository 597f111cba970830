"""Before a run's first optimizer step every ratio is 1: trainers replay what rollouts did."""

from __future__ import annotations

import logging

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from digenrl.algorithms.meters import NOTHING

logger = logging.getLogger(__name__)

RATIO_BOUND = {torch.float32: 1e-5, torch.float64: 1e-5}
"""Largest first |ratio - 1| by the dtype in which forwards compute, whatever dtype stores the
weights."""
HALF_RATIO_BOUND = 1e-3
"""16-bit kernels round differently at another batch geometry or on another GPU; verl-omni measures
1e-5 at 65,536 dimensions (docs rollout_correction.md:99), small latents average less."""
MOST = 0.999
"""The quantile of the first deviations that is shown beside the largest: it tells rounding from a
few wrong cells."""


class FirstRatios:
    """|ratio - 1| of this rank's live cells, until the first optimizer step."""

    def __init__(self, dtype: torch.dtype, bound: float | None = None) -> None:
        """bound: None = that of the dtype in which forwards compute."""
        self.bound = RATIO_BOUND.get(dtype, HALF_RATIO_BOUND) if bound is None else bound
        self._dtype = dtype
        self._deviations: list[Tensor] = []

    def keep(self, deviations: Tensor) -> None:
        """Take |ratio - 1| of cells, of any shape."""
        self._deviations.append(deviations.flatten().double())

    def largest(self, module: pl.LightningModule) -> float | None:
        """Return the largest deviation of all ranks; None if no rank had a cell. Then no weight
        changes either, and the next update counts as the first. This is a collective.

        Raises:
            RuntimeError: it is above the bound.
        """
        # A rank without cells takes part too.
        none = torch.tensor([NOTHING], dtype=torch.float64, device=module.device)
        deviations = _everyones(module, torch.cat([none, *self._deviations]))
        deviations, self._deviations = deviations[deviations != NOTHING], []
        if not len(deviations):
            return None
        found, most = float(deviations.max()), float(torch.quantile(deviations, MOST))
        if found > self.bound:
            rounding = most <= self.bound or self._dtype not in RATIO_BOUND
            remedy = (
                f"If it is rounding, set algorithm.ratio_bound={2 * found:.1g}"
                if rounding
                else "Check that trainers and rollouts use equal weights, model.dtype, guidance "
                "and model.attention_backend"
            )
            raise RuntimeError(
                f"max |ratio-1| before the first optimizer step is {found:.3g}, above "
                f"{self.bound:g} ({MOST:.1%} quantile {most:.3g}, computed in "
                f"{str(self._dtype).removeprefix('torch.')}): replay does not reproduce the "
                f"rollout. {remedy}; schedule.tsp.batch=1 gives replay the rollout's geometry."
            )
        logger.info("max |ratio-1| is %.3g, its %g%% quantile %.3g", found, 100 * MOST, most)
        return found


def _everyones(module: pl.LightningModule, values: Tensor) -> Tensor:
    """Return the values [n] of all trainers together; n may differ from rank to rank."""
    sizes = torch.as_tensor(
        module.all_gather(torch.tensor(len(values), device=values.device))
    ).flatten()
    padded = nn.functional.pad(values, (0, int(sizes.max()) - len(values)))
    rows = torch.as_tensor(module.all_gather(padded)).reshape(len(sizes), -1)
    return torch.cat([row[:size] for row, size in zip(rows, sizes.tolist(), strict=True)])
