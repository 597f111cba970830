"""Supervised fine-tuning by flow matching: samples come from files, and rewards do not matter.

See `losses.flow_matching_loss`.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from digenrl.algorithms.base import CommonArguments, PolicyModule
from digenrl.extensions.methods.forward_losses import flow_matching_loss
from digenrl.extensions.methods.noised import noise_cells
from digenrl.models.policy import Policy
from digenrl.types import CellBlock, TrainBatch

STREAM = "supervised"


class Supervised(PolicyModule):
    """Loss per cell: `flow_matching_loss` at a noise level of the sampler's own grid. Published
    trainers draw levels from a continuous distribution; here training visits what sampling visits.
    """

    needs_final, rewarded = True, False

    def __init__(
        self,
        policy: Policy,
        seed: int,
        **common: Unpack[CommonArguments],
    ) -> None:
        """Take the settings of `algorithm`. `seed` keys the noise."""
        super().__init__(policy, **common)
        self.seed = seed

    def cell_losses(
        self, block: CellBlock, advantages: Tensor, batch: TrainBatch, live: bool
    ) -> Tensor:
        """Return the losses, [b, K]."""
        cells = noise_cells(block, range(block.samples), block.numbers, self.seed, STREAM)
        return flow_matching_loss(cells.predict_velocity(self.policy), cells.noise, cells.clean)
