"""RVM, reward-based velocity matching, for students of few steps: the student samples with its own
steps, and its endpoint is noised to any level.

After hao-ai-lab/FastVideo fastvideo/train/methods/rl/common/rvm_utils.py at 5f8b7df (pull request
1806). See `forward_losses.rvm_loss`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Unpack, get_args

from torch import Tensor

from digenrl.algorithms.base import CommonArguments
from digenrl.algorithms.parts import by_part
from digenrl.extensions.methods.forward_losses import rvm_loss
from digenrl.extensions.methods.forward_process import STREAM, ForwardProcess
from digenrl.extensions.methods.noised import noise_cells, uniform_levels
from digenrl.models.policy import Policy
from digenrl.types import CellBlock, TrainBatch

Levels = Literal["uniform", "grid"]


class RVM(ForwardProcess):
    """Gradient per cell: c*(v - (eps - x0)) + kl_weight*(v - v_base), c = scale * A, A clipped to
    +-max_advantage."""

    splits_parts = True

    def __init__(
        self,
        policy: Policy,
        seed: int,
        scale: float = 0.1,
        levels: Levels = "uniform",
        max_advantage: float = 5.0,
        kl_weight: float = 0.0,
        **common: Unpack[CommonArguments],
    ) -> None:
        """`levels` uniform: each cell has a noise level of its own between 0 and 1, and train_steps
        only gives their number. grid: the levels of train_steps, which are few for a few-step
        student. `kl_weight`: the source's anchor. `seed` keys noise and levels."""
        super().__init__(policy, seed, kl_weight=kl_weight, max_advantage=max_advantage, **common)
        if levels not in get_args(Levels):
            raise ValueError(f"algorithm.levels = {levels}: use {' or '.join(get_args(Levels))}")
        if scale <= 0:
            raise ValueError(f"RVM needs scale > 0, got {scale}: the source has 0.1")
        self.scale, self.levels = scale, levels

    def useful_samples(self, rewards: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
        """Return which samples can have a gradient: without an anchor, those with an advantage."""
        if self.kl_weight > 0:
            return super().useful_samples(rewards, weights)
        return self.nonzero_advantages(rewards, weights)

    def cell_losses(
        self, block: CellBlock, advantages: Tensor, batch: TrainBatch, live: bool
    ) -> Tensor:
        """Return the losses, [b, K]."""
        own = uniform_levels(block, self.seed) if self.levels == "uniform" else None
        cells = noise_cells(block, range(block.samples), block.numbers, self.seed, STREAM, own)
        reference = self.base_velocity(cells) if self.kl_weight > 0 else None
        new = cells.predict_velocity(self.policy)
        self.kl_term(new.detach(), reference, live)  # counted; its gradient is the anchor's
        coefficient = new.new_zeros(len(new), 1, new.shape[2])  # of each token
        for part, own in by_part(self.parts, advantages):
            bounded = own.clamp(-self.max_advantage, self.max_advantage)
            coefficient[:, :, part.tokens] = self.scale * bounded[:, None, None]
        return rvm_loss(new, cells.target, coefficient, reference, self.kl_weight)
