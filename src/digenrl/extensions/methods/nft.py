"""DiffusionNFT (arXiv 2509.16117): reinforcement on the forward process, without log-probs or SDE
noise.

Rollouts are made by an *old* policy, a copy of the trained parameters that follows them by a
schedule, with any ODE solver; only the clean latent is stored. See `losses.nft_loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from digenrl.algorithms.advantages import Advantage
from digenrl.algorithms.base import PolicyModule
from digenrl.algorithms.copies import Ema, ParameterCopy
from digenrl.algorithms.objectives import mean_dims
from digenrl.diffusion.sde import Kernel
from digenrl.diffusion.steps import StepSelection
from digenrl.extensions.methods.forward_losses import nft_loss
from digenrl.extensions.methods.noised import noised
from digenrl.models.policy import Policy
from digenrl.types import CellBlock, TrainBatch

STREAM = "forward"


@dataclass(frozen=True)
class OldPolicySchedule:
    """old = d*old + (1-d)*new after every `every`-th RL step, d = min(max(step - delay, 0)*ramp,
    ceiling).

    The paper's soft update of the sampling policy, and the three schedules of its code
    (NVlabs/DiffusionNFT `return_decay`) and of verl-omni (diffusion_trainer_utils.py:20-39): type
    0, `copy` = ceiling 0 (on-policy); type 1, `linear_to_0_5` = ramp 0.001, ceiling 0.5; type 2,
    `delayed_linear_to_0_999` = delay 75, ramp 0.0075, ceiling 0.999. They count gradient steps; RL
    steps count here, so that `updates_per_batch` leaves the schedule alone.
    """

    delay: int = 0
    ramp: float = 0.001
    ceiling: float = 0.5
    every: int = 1

    def __post_init__(self) -> None:
        if self.delay < 0 or self.ramp < 0 or not 0 <= self.ceiling < 1 or self.every < 1:
            raise ValueError(
                f"old_policy needs delay, ramp >= 0, 0 <= ceiling < 1, every >= 1, got {self}"
            )

    def decay(self, step: int) -> float:
        """d after RL step `step` (0-based)."""
        return min(max(step - self.delay, 0) * self.ramp, self.ceiling)


class NFT(PolicyModule):
    """Loss per cell: `nft_loss` + kl_weight * mean((v - v_base)^2)."""

    needs_final = True

    def __init__(
        self,
        policy: Policy,
        sde: Kernel,
        train_steps: StepSelection,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        advantage: Advantage,
        old_policy: OldPolicySchedule,
        seed: int,
        beta: float = 0.1,
        max_advantage: float = 5.0,
        kl_weight: float = 1e-4,
        updates_per_batch: int = 1,
        max_grad_norm: float | None = 1.0,
        ema: Ema | None = None,
    ) -> None:
        """beta: 1.0 for SD3 (Flow-Factory, UniRL), 0.1 for Wan and Qwen-Image. max_advantage M = 5.
        kl_weight 1e-4 (verl-omni); 0 runs no base model. seed keys the forward noise."""
        super().__init__(
            policy, sde, train_steps, optimizer, advantage, updates_per_batch, max_grad_norm, ema
        )
        if beta <= 0 or max_advantage <= 0 or kl_weight < 0:
            raise ValueError(
                f"NFT needs beta > 0, max_advantage > 0 and kl_weight >= 0, got beta={beta}, "
                f"max_advantage={max_advantage}, kl_weight={kl_weight}"
            )
        self.old_policy, self.seed = old_policy, seed
        self.beta, self.max_advantage, self.kl_weight = beta, max_advantage, kl_weight
        self._old = self.copies["old_policy"] = ParameterCopy()

    def rollout_parameters(self) -> dict[str, Tensor]:
        """Return the parameters of the old policy."""
        return dict(self._old.tensors) or super().rollout_parameters()

    def rollout_weights(self) -> AbstractContextManager[None]:
        """Give this rank the old policy's weights inside the context."""
        return self._old.swapped(self.policy.adapter.trained_parameters())

    def on_train_start(self) -> None:
        """Start the old policy as a copy of the trained one."""
        super().on_train_start()
        if not self._old.tensors:
            self._old.follow(self.policy.adapter.trained_parameters())

    def cell_losses(
        self, block: CellBlock, advantages: Tensor, batch: TrainBatch, live: bool
    ) -> Tensor:
        """[b, K]."""
        cells = noised(block, range(block.samples), block.numbers, self.seed, STREAM)
        with torch.no_grad(), self.rollout_weights():
            old = cells.velocity(self.policy)
        reference = None
        if self.kl_weight > 0:
            with torch.no_grad(), self.policy.adapter.reference():
                reference = cells.velocity(self.policy)
        new = cells.velocity(self.policy)
        losses = nft_loss(
            new,
            old,
            cells.noisy,
            cells.clean,
            cells.sigma[None],
            advantages[:, None],
            self.beta,
            self.max_advantage,
        )
        if reference is not None:
            kl = mean_dims((new - reference) ** 2)
            losses = losses + self.kl_weight * kl
            self._meters.update("kl", kl.sum() * live, kl.numel() * live)
        drift = mean_dims((new.detach() - old) ** 2)
        self._meters.update("velocity_drift", drift.sum() * live, drift.numel() * live)
        return losses

    def after_update(self, batch: TrainBatch, changed: bool) -> None:
        """Let the old policy follow after the last update of a logical batch."""
        super().after_update(batch, changed)
        last = batch.update == self.updates_per_batch - 1
        if last and (batch.version + 1) % self.old_policy.every == 0:
            self._old.follow(
                self.policy.adapter.trained_parameters(), self.old_policy.decay(batch.version)
            )
