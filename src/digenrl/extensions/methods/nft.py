"""DiffusionNFT (arXiv 2509.16117): reinforcement on the forward process, without log-probs or SDE
noise.

Rollouts are made by an *old* policy: a copy of the trained parameters that follows them by a
schedule. Any ODE solver will do, because only the clean latent is stored. See
`forward_losses.nft_loss`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Unpack

import torch
from torch import Tensor

from digenrl.algorithms.base import CommonArguments
from digenrl.algorithms.parts import Part, by_part
from digenrl.extensions.methods.forward_losses import nft_loss
from digenrl.extensions.methods.forward_process import STREAM, OldPolicySchedule, WithOldPolicy
from digenrl.extensions.methods.noised import noise_cells
from digenrl.models.policy import Policy
from digenrl.types import CellBlock, TrainBatch

__all__ = ["NFT", "OldPolicySchedule"]


class NFT(WithOldPolicy):
    """Loss per cell: `nft_loss` + kl_weight * mean((v - v_base)^2).

    If modalities have advantages of their own, `nft_loss` is the mean of theirs, each weighed by
    its share of a sample's numbers.
    """

    splits_parts = True

    def __init__(
        self,
        policy: Policy,
        old_policy: OldPolicySchedule,
        seed: int,
        beta: float = 0.1,
        max_advantage: float = 5.0,
        kl_weight: float = 1e-4,
        **common: Unpack[CommonArguments],
    ) -> None:
        """Take the settings of `algorithm`. `beta` is 1.0 for SD3 (Flow-Factory, UniRL), 0.1 for
        Wan and Qwen-Image. `max_advantage` M is 5. `kl_weight` is 1e-4 (verl-omni), and 0 runs no
        base model. `seed` keys the forward noise."""
        super().__init__(
            policy,
            old_policy,
            seed=seed,
            kl_weight=kl_weight,
            max_advantage=max_advantage,
            **common,
        )
        if beta <= 0:
            raise ValueError(f"NFT needs beta > 0, got beta={beta}")
        self.beta = beta

    def rollout_parameters(self) -> dict[str, Tensor]:
        """Return the parameters of the old policy."""
        return dict(self._old.tensors) or super().rollout_parameters()

    def rollout_weights(self) -> AbstractContextManager[None]:
        """Give this rank the old policy's weights inside the context."""
        return self.in_old()

    def cell_losses(
        self, block: CellBlock, advantages: Tensor, batch: TrainBatch, live: bool
    ) -> Tensor:
        """Return the losses, [b, K]."""
        cells = noise_cells(block, range(block.samples), block.numbers, self.seed, STREAM)
        old = self.old_velocity(cells)
        reference = self.base_velocity(cells) if self.kl_weight > 0 else None
        new = cells.predict_velocity(self.policy)

        def part_loss(part: Part, own: Tensor) -> Tensor:
            velocity, earlier, noisy, clean = (
                tensor[:, :, part.tokens] for tensor in (new, old, cells.noisy, cells.clean)
            )
            weighed = cells.sigma[None], own[:, None], self.beta, self.max_advantage
            return part.share * nft_loss(velocity, earlier, noisy, clean, *weighed)

        parts = by_part(self.parts, advantages)
        losses = torch.stack([part_loss(*each) for each in parts]).sum(dim=0)
        self.count_drift(new, old, live)
        return losses + self.kl_term(new, reference, live)
