"""A whole trajectory at once; a run takes its steps one by one, in `rollout/engine.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from digenrl.diffusion.denoise import (
    FinishedSamples,
    SampleKey,
    advance_state,
    finished_samples,
    initial_state,
)
from digenrl.diffusion.sde import Kernel
from digenrl.diffusion.steps import StepPlan
from digenrl.models.policy import Policy


def sample(
    policy: Policy,
    condition: dict[str, Tensor],
    key: SampleKey,
    sigmas: Tensor,
    kernel: Kernel,
    plan: StepPlan,
    storage_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    same_noise: bool = False,
    keep_means: bool = False,
) -> FinishedSamples:
    """Run start, then advance through all T steps, then finish."""
    state = initial_state(key, policy.latent_shape, storage_dtype, device, same_noise)
    for _ in range(sigmas.numel() - 1):
        state = advance_state(policy, condition, state, sigmas, kernel, plan, keep_means)
    return finished_samples(state, plan)
