"""What methods of the forward process share: samples noised again, a frozen base, an old copy.

No log-probs, no SDE noise: rollouts use any ODE solver, and only the clean latent is stored.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from digenrl.algorithms.base import CommonArguments, PolicyModule
from digenrl.algorithms.copies import ParameterCopy
from digenrl.algorithms.objectives import mean_dims
from digenrl.algorithms.parts import advantages_of_parts
from digenrl.extensions.methods.noised import NoisedCells
from digenrl.models.policy import Policy
from digenrl.types import TrainBatch

logger = logging.getLogger(__name__)
STREAM = "forward"
STILL_STEPS = 2
"""RL steps after the first in which the policy may equal its old copy: published schedules begin
with a decay of 0, for one step."""


@dataclass(frozen=True)
class OldPolicySchedule:
    """old = d*old + (1-d)*new after every `every`-th RL step, d = min(max(step - delay, 0)*ramp,
    ceiling).

    This is DiffusionNFT's soft update of the sampling policy. Its code (NVlabs/DiffusionNFT
    `return_decay`) and verl-omni (diffusion_trainer_utils.py:20-39) have three schedules:

    - type 0, `copy`: ceiling 0 (on-policy)
    - type 1, `linear_to_0_5`: ramp 0.001, ceiling 0.5
    - type 2, `delayed_linear_to_0_999`: delay 75, ramp 0.0075, ceiling 0.999

    AWM and DGPO use ramp 0.001 and ceiling 0.3. The sources count gradient steps. Here RL steps
    count, so that `updates_per_batch` does not change the schedule.
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

    def decay_after(self, step: int) -> float:
        """Return d after RL step `step` (0-based)."""
        return min(max(step - self.delay, 0) * self.ramp, self.ceiling)


class ForwardArguments(CommonArguments):
    """Arguments of `ForwardProcess`."""

    seed: int
    kl_weight: float
    max_advantage: float


class ForwardProcess(PolicyModule):
    """Base of methods that train on clean latents, noised again."""

    needs_final = True

    def __init__(
        self,
        policy: Policy,
        seed: int,
        kl_weight: float,
        max_advantage: float,
        **common: Unpack[CommonArguments],
    ) -> None:
        """Take the settings of `algorithm`. `seed` keys the forward noise. `kl_weight` is the
        weight of `kl_term`, and 0 runs no base model. `max_advantage` bounds |A|."""
        super().__init__(policy, **common)
        if max_advantage <= 0 or kl_weight < 0:
            raise ValueError(
                f"{type(self).__name__} needs max_advantage > 0 and kl_weight >= 0, got "
                f"max_advantage={max_advantage}, kl_weight={kl_weight}"
            )
        self.seed, self.kl_weight, self.max_advantage = seed, kl_weight, max_advantage

    def base_velocity(self, cells: NoisedCells) -> Tensor:
        """Return the frozen base model's velocity [b, K, *L]."""
        with torch.no_grad(), self.policy.adapter.reference():
            return cells.predict_velocity(self.policy)

    def kl_term(self, new: Tensor, reference: Tensor | None, live: bool) -> Tensor | float:
        """Return kl_weight * mean((v - v_base)^2), [b, K]; 0 without a reference. Counts it."""
        if reference is None:
            return 0.0
        kl = mean_dims((new - reference) ** 2)
        self._meters.update("kl", kl.sum() * live, kl.numel() * live)
        return self.kl_weight * kl

    def nonzero_advantages(
        self, rewards: Mapping[str, Tensor], weights: Mapping[str, float]
    ) -> Tensor:
        """Return [P, G] bool: samples with an advantage. What `useful` may say where the loss is A
        times something."""
        found = advantages_of_parts(self.parts, self.advantage, rewards, weights)
        return (found != 0).any(dim=-1)


class WithOldPolicy(ForwardProcess):
    """Adds an old policy: a copy of the trained parameters that follows them by a schedule."""

    def __init__(
        self,
        policy: Policy,
        old_policy: OldPolicySchedule,
        **given: Unpack[ForwardArguments],
    ) -> None:
        super().__init__(policy, **given)
        self.old_policy = old_policy
        self._still = 0
        self._old = self.copies["old_policy"] = ParameterCopy()

    def in_old(self) -> AbstractContextManager[None]:
        """Give this rank the old policy's weights inside the context."""
        return self._old.swapped_into(self.policy.adapter.trained_parameters())

    def old_velocity(self, cells: NoisedCells) -> Tensor:
        """Return the old policy's velocity [b, K, *L]."""
        with torch.no_grad(), self.in_old():
            return cells.predict_velocity(self.policy)

    def count_drift(self, new: Tensor, old: Tensor, live: bool) -> None:
        """Log how far the policy is from its old copy: mean((v - v_old)^2)."""
        drift = mean_dims((new.detach() - old) ** 2)
        self._meters.update("velocity_drift", drift.sum() * live, drift.numel() * live)

    def collect_metrics(self) -> dict[str, Tensor]:
        """Return the RL step's metrics. Warn once where the policy keeps equalling its old copy:
        the loss then contrasts nothing (Tencent-Hunyuan/UniRL#420: no gain in 75 such steps)."""
        found = super().collect_metrics()
        if "velocity_drift" in found and self.current_epoch > 0:
            self._still = self._still + 1 if float(found["velocity_drift"]) == 0.0 else 0
        if self._still == STILL_STEPS and self.global_rank == 0:
            logger.warning(
                f"the policy has equalled its old copy for {STILL_STEPS} RL steps "
                "(mean((v - v_old)^2) is exactly 0), so the loss contrasts nothing: "
                f"algorithm.old_policy keeps none of the old one at RL step {self.current_epoch} "
                f"({self.old_policy}); lower its delay, raise its ceiling or ramp, or set "
                "algorithm.updates_per_batch above 1"
            )
        return found

    def on_train_start(self) -> None:
        """Start the old policy as a copy of the trained one."""
        super().on_train_start()
        if not self._old.tensors:
            self._old.follow_parameters(self.policy.adapter.trained_parameters())

    def after_update(self, batch: TrainBatch, changed: bool) -> None:
        """Let the old policy follow after the last update of a logical batch."""
        super().after_update(batch, changed)
        last = batch.update == self.updates_per_batch - 1
        if last and (batch.version + 1) % self.old_policy.every == 0:
            self._old.follow_parameters(
                self.policy.adapter.trained_parameters(), self.old_policy.decay_after(batch.version)
            )
