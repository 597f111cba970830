"""DGPO (arXiv 2510.08425): direct group preference optimisation, DPO's sigmoid over a whole group
weighed by its advantages.

As in Luo-Yihong/DGPO scripts/train_sd3_dgpo.py at 01ceb4b: the samples of a group share noise and
noise level, so the group meets in one task. See `forward_losses.dgpo_weight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Unpack

import torch
from torch import Tensor

from digenrl.algorithms.base import CommonArguments
from digenrl.algorithms.objectives import clip_binds, mean_dims
from digenrl.extensions.methods.forward_losses import dgpo_weight
from digenrl.extensions.methods.forward_process import OldPolicySchedule, WithOldPolicy
from digenrl.extensions.methods.noised import noise_cells
from digenrl.models.policy import Policy
from digenrl.types import CellBlock, TrainBatch

STREAM = "group"


class DGPO(WithOldPolicy):
    """Loss per cell: `dgpo_weight` * A * d + kl_weight * mean((v - v_base)^2), d = mean((v - (eps -
    x0))^2).

    The ratio to the old policy is r = exp(d_old - d). A cell whose r has left 1 +- ratio_clip on
    the side to which A pushes has no gradient.
    """

    compares_with_base = True

    def __init__(
        self,
        policy: Policy,
        old_policy: OldPolicySchedule,
        seed: int,
        beta: float = 100.0,
        ratio_clip: float | None = 1e-2,
        max_advantage: float = 5.0,
        kl_weight: float = 2e-2,
        old_rollouts_from: int | None = 500,
        train_guidance: float | None = None,
        **common: Unpack[CommonArguments],
    ) -> None:
        """`beta` of the sigmoid: 100 (GenEval, OCR), 10 (PickScore). `ratio_clip`: 1e-2 (GenEval,
        OCR), 5e-2 (PickScore); null: no clip. `old_rollouts_from`: RL step from which the old
        policy makes the rollouts (500, 200); null: never. `train_guidance`: guidance scale of
        training forwards, 1 in the source, which samples with 4.5; null: the scale of sampling.
        `seed` keys the forward noise."""
        super().__init__(
            policy,
            old_policy,
            seed=seed,
            kl_weight=kl_weight,
            max_advantage=max_advantage,
            **common,
        )
        if beta <= 0 or (ratio_clip is not None and ratio_clip <= 0):
            raise ValueError(
                f"DGPO needs beta > 0 and ratio_clip > 0 or null, got beta={beta}, "
                f"ratio_clip={ratio_clip}"
            )
        self.beta, self.ratio_clip, self.train_guidance = beta, ratio_clip, train_guidance
        self.old_rollouts_from = old_rollouts_from
        self._steps_done = 0

    def useful_samples(self, rewards: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
        """Return which samples can have a gradient: all, or without a KL term those of groups in
        which a reward differs, whole groups because a group meets."""
        if self.kl_weight > 0:
            return super().useful_samples(rewards, weights)
        found = self.nonzero_advantages(rewards, weights)
        return found.any(dim=1, keepdim=True).expand_as(found)

    @property
    def old_makes_rollouts(self) -> bool:
        """Whether the old policy makes the rollouts of the version that is trained next."""
        start = self.old_rollouts_from
        if start is None or not self._old.tensors:
            return False
        # An epoch is an RL step. A resumed run knows its epoch and has had no update yet.
        return max(self._steps_done, self.current_epoch) >= start

    def after_update(self, batch: TrainBatch, changed: bool) -> None:
        """Count the RL step after its last update."""
        super().after_update(batch, changed)
        if batch.update == self.updates_per_batch - 1:
            self._steps_done = batch.version + 1

    def rollout_parameters(self) -> dict[str, Tensor]:
        """Return the parameters of the old policy from its RL step on, the present ones before."""
        return dict(self._old.tensors) if self.old_makes_rollouts else super().rollout_parameters()

    def rollout_weights(self) -> AbstractContextManager[None]:
        """Give this rank `rollout_parameters` inside the context."""
        return self.in_old() if self.old_makes_rollouts else super().rollout_weights()

    def cell_losses(
        self, block: CellBlock, advantages: Tensor, batch: TrainBatch, live: bool
    ) -> Tensor:
        """Return the losses, [G, K]."""
        group = next(iter(batch.rewards.values())).shape[1]
        if block.samples != group:
            raise ValueError(
                f"DGPO compares the {group} samples of a group, and a task holds {block.samples}: "
                f"set sampling.task_size={group}"
            )
        advantages = advantages.clamp(-self.max_advantage, self.max_advantage)[:, None]
        cells = noise_cells(block, range(group), [0] * group, self.seed, STREAM)
        scale = self.train_guidance
        with nullcontext() if scale is None else self.policy.guided_by(scale):
            reference = self.base_velocity(cells)
            old = None if self.ratio_clip is None else self.old_velocity(cells)
            new = cells.predict_velocity(self.policy)
        distance = mean_dims((new - cells.target) ** 2)
        base = mean_dims((reference - cells.target) ** 2)
        weight = dgpo_weight(distance.detach(), base, advantages, self.beta)
        if self.ratio_clip is not None and old is not None:
            ratio = torch.exp(mean_dims((old - cells.target) ** 2) - distance.detach())
            cut = clip_binds(ratio, advantages, self.ratio_clip, self.ratio_clip)
            self._meters.update("clip_fraction", cut.sum() * live, cut.numel() * live)
            self._meters.update_peak("ratio_max_dev", (ratio - 1.0).abs().amax(), float(live))
            self.count_drift(new, old, live)
            distance = torch.where(cut, distance.detach(), distance)
        return weight * advantages * distance + self.kl_term(new, reference, live)
