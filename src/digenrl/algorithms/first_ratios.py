"""Before a run's first optimizer step every ratio is 1: trainers replay what rollouts did."""

from __future__ import annotations

import logging

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from digenrl.algorithms.meters import NOTHING
from digenrl.rounding import WHOLE_PRECISION, first_ratio_bound

logger = logging.getLogger(__name__)

MOST = 0.999
"""The quantile of the first deviations that is shown beside the largest: it tells rounding from a
few wrong cells."""


class FirstRatios:
    """|ratio - 1| of this rank's live cells, until the first optimizer step."""

    def __init__(
        self,
        dtype: torch.dtype,
        bound: float | None = None,
        clip: tuple[float, float] | None = None,
    ) -> None:
        """Take the dtype in which forwards compute, whatever dtype stores the weights. A `bound` of
        None is `rounding.first_ratio_bound` of this dtype and of `clip`."""
        self._dtype = str(dtype).removeprefix("torch.")
        self.bound = first_ratio_bound(self._dtype, clip) if bound is None else bound
        self._deviations: list[Tensor] = []

    def keep_deviations(self, deviations: Tensor) -> None:
        """Take |ratio - 1| of cells, of any shape."""
        self._deviations.append(deviations.flatten().double())

    def largest_deviation(self, module: pl.LightningModule) -> float | None:
        """Return the largest deviation of all ranks; None if no rank had a cell. Then no weight
        changes either, and the next update counts as the first. This is a collective.

        Raises:
            RuntimeError: it is above the bound.
        """
        # A rank without cells takes part too.
        none = torch.tensor([NOTHING], dtype=torch.float64, device=module.device)
        deviations = _gather_values(module, torch.cat([none, *self._deviations]))
        deviations, self._deviations = deviations[deviations != NOTHING], []
        if not len(deviations):
            return None
        found, most = float(deviations.max()), float(torch.quantile(deviations, MOST))
        if found > self.bound:
            # A few cells above the bound are rounding. If nearly all are, in fp32, something is
            # different.
            rounding = most <= self.bound or self._dtype not in WHOLE_PRECISION
            remedy = (
                "If it is rounding, schedule.tsp.batch=1 and model.compile=false avoid it, and "
                f"algorithm.ratio_bound={2 * found:.1g} accepts it"
                if rounding
                else "Check that trainers and rollouts use equal weights, model.dtype, guidance "
                "and model.attention_backend"
            )
            raise RuntimeError(
                f"max |ratio-1| before the first optimizer step is {found:.3g}, above "
                f"{self.bound:g} ({MOST:.1%} quantile {most:.3g}, computed in {self._dtype}): "
                f"replay does not reproduce the rollout. {remedy}; schedule.tsp.batch=1 gives "
                "replay the rollout's geometry."
            )
        logger.info("max |ratio-1| is %.3g, its %g%% quantile %.3g", found, 100 * MOST, most)
        return found


def _gather_values(module: pl.LightningModule, values: Tensor) -> Tensor:
    """Return the values [n] of all trainers together; n may differ from rank to rank."""
    sizes = torch.as_tensor(
        module.all_gather(torch.tensor(len(values), device=values.device))
    ).flatten()
    # all_gather needs equal lengths: pad to the longest, and cut each row again.
    padded = nn.functional.pad(values, (0, int(sizes.max()) - len(values)))
    rows = torch.as_tensor(module.all_gather(padded)).reshape(len(sizes), -1)
    return torch.cat([row[:size] for row, size in zip(rows, sizes.tolist(), strict=True)])
