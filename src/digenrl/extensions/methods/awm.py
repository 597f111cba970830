"""Advantage-weighted matching (arXiv 2509.25050): the policy gradient's ratio, with the matching
loss of the forward process in the place of a log-prob.

As in scxue/advantage_weighted_matching scripts/train_sd3_awm.py at be51372: one noise for each
sample and time, the same under all weights; rollouts by the present weights. See
`forward_losses.matching_value`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack, get_args

import torch
from torch import Tensor

from digenrl.algorithms.base import CommonArguments
from digenrl.algorithms.copies import BatchStart
from digenrl.algorithms.objectives import clip_binds, clipped_surrogate, mean_dims
from digenrl.extensions.methods.forward_losses import MatchingKind, matching_value
from digenrl.extensions.methods.forward_process import STREAM, OldPolicySchedule, WithOldPolicy
from digenrl.extensions.methods.noised import NoisedCells, noise_cells
from digenrl.models.policy import Policy
from digenrl.types import CellBlock, TrainBatch


class AWM(WithOldPolicy):
    """Loss per cell: PPO's clipped surrogate, and the distances from the old policy and the base.

        surrogate(r, A) + old_weight * mean((v - v_old)^2) + kl_weight * mean((v - v_base)^2)

    The ratio is r = exp(value - value at the batch's start). A is clipped to +-M and divided by M.

    The old policy only holds the new policy back. The ratio compares with the weights at the
    beginning of the logical batch, so r is exactly 1 in each batch's first update.
    """

    def __init__(
        self,
        policy: Policy,
        old_policy: OldPolicySchedule,
        seed: int,
        matching: MatchingKind = "ghuber",
        power: float = 0.25,
        ratio_clip: float = 1.0,
        max_advantage: float = 5.0,
        kl_weight: float = 1e-3,
        old_weight: float = 1.0,
        **common: Unpack[CommonArguments],
    ) -> None:
        """Take the settings of `algorithm`. `matching` and `power` are those of `matching_value`.
        In the source `kl_weight` is 1e-3 (GenEval), 3e-3 (OCR) or 1e-4 (PickScore), and
        `old_weight` is 1 (`ema_beta`). `seed` keys the forward noise."""
        super().__init__(
            policy,
            old_policy,
            seed=seed,
            kl_weight=kl_weight,
            max_advantage=max_advantage,
            **common,
        )
        if matching not in get_args(MatchingKind):
            raise ValueError(
                f"algorithm.matching = {matching}: use {' or '.join(get_args(MatchingKind))}"
            )
        if not 0 < ratio_clip <= 1 or not 0 < power <= 1 or old_weight < 0:
            raise ValueError(
                "AWM needs ratio_clip and power in 0..1 and old_weight >= 0, got ratio_clip="
                f"{ratio_clip}, power={power}, old_weight={old_weight}"
            )
        self.matching: MatchingKind = matching
        self.power, self.ratio_clip, self.old_weight = power, ratio_clip, old_weight
        self._batch_start = BatchStart()

    def useful_samples(self, rewards: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
        """Return which samples can have a gradient: with nothing that holds the policy back, those
        with an advantage."""
        if self.kl_weight > 0 or self.old_weight > 0:
            return super().useful_samples(rewards, weights)
        return self.nonzero_advantages(rewards, weights)

    def training_step(self, batch: TrainBatch, batch_idx: int) -> Tensor:
        """Return the micro-batch's loss; keep the weights at the start of a logical batch that has
        more than one update."""
        if self.updates_per_batch > 1:
            self._batch_start.keep_start(self.policy.adapter.trained_parameters(), batch.version)
        return super().training_step(batch, batch_idx)

    def cell_losses(
        self, block: CellBlock, advantages: Tensor, batch: TrainBatch, live: bool
    ) -> Tensor:
        """Return the losses, [b, K]."""
        cells = noise_cells(block, range(block.samples), block.numbers, self.seed, STREAM)
        start = self._start_velocity(cells, batch)
        old = self.old_velocity(cells) if self.old_weight > 0 else None
        reference = self.base_velocity(cells) if self.kl_weight > 0 else None
        new = cells.predict_velocity(self.policy)
        value = self._cell_values(new, cells)
        start_value = value.detach() if start is None else self._cell_values(start, cells)
        ratio = torch.exp(value - start_value)
        weight = (advantages.clamp(-self.max_advantage, self.max_advantage) / self.max_advantage)[
            :, None
        ]
        losses = clipped_surrogate(ratio, weight, self.ratio_clip).to(new.dtype)
        cut = clip_binds(ratio, weight, self.ratio_clip, self.ratio_clip)
        self._meters.update("clip_fraction", cut.sum() * live, cut.numel() * live)
        self._meters.update_peak("ratio_max_dev", (ratio.detach() - 1.0).abs().amax(), float(live))
        if old is not None:
            self.count_drift(new, old, live)
            losses = losses + self.old_weight * mean_dims((new - old) ** 2)
        return losses + self.kl_term(new, reference, live)

    def _cell_values(self, velocity: Tensor, cells: NoisedCells) -> Tensor:
        return matching_value(velocity, cells.target, cells.sigma[None], self.matching, self.power)

    def _start_velocity(self, cells: NoisedCells, batch: TrainBatch) -> Tensor | None:
        """Return the velocity at the beginning of the logical batch; None in its first update,
        whose weights these are."""
        if batch.update == 0:
            return None
        with (
            torch.no_grad(),
            self._batch_start.swapped_into(self.policy.adapter.trained_parameters()),
        ):
            return cells.predict_velocity(self.policy)
