"""Per-cell losses as pure tensor functions.

Legend of shapes: b samples of a block, K steps, D latent dimensions of a sample. Log-probs are
means over D (`diffusion.sde`), so log-ratios are 1/D of the joint ones. Every function returns one
value per cell, [b, K], and leaves the reduction to the caller. The loss of an update is the sum
over its cells divided by its denominator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from digenrl.diffusion.sde import Kernel
from digenrl.diffusion.sigmas import step_sigmas


def mean_dims(value: Tensor) -> Tensor:
    """Return mean over the latent dimensions: [b, K, *L] -> [b, K]."""
    return value.flatten(2).mean(dim=2)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float | None = None
) -> Tensor:
    """Return PPO's pessimistic loss max(-A*r, -A*clamp(r, 1-low, 1+high)), [b, K], for a ratio [b,
    K] and advantages that broadcast to it.

    `high` defaults to `low`. From Schulman et al. 2017, arXiv 1707.06347; per denoising step as in
    yifan123/flow_grpo train_sd3.py:880-893.

    Example:
        A good sample gains nothing above 1.25. For a bad one, the loss goes on rising there:

        >>> ratio = torch.tensor([[0.5, 1.0, 1.5]])  # [b, K]
        >>> clipped_surrogate(ratio, torch.tensor([[1.0]]), clip_low=0.25)
        tensor([[-0.5000, -1.0000, -1.2500]])
        >>> clipped_surrogate(ratio, torch.tensor([[-1.0]]), clip_low=0.25)
        tensor([[0.7500, 1.0000, 1.5000]])
    """
    upper = 1.0 + (clip_low if clip_high is None else clip_high)
    # The larger loss is the smaller objective: beyond a bound there is nothing more to win.
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1.0 - clip_low, upper))


def clip_binds(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Return [b, K] bool: where `clipped_surrogate` is flat. A ratio beyond the other bound keeps
    its gradient, so this is less than the share of ratios outside the range, which
    yifan123/flow_grpo logs as `clipfrac`.

    Example:
        >>> ratio = torch.tensor([[0.5, 1.0, 1.5]])  # [b, K]
        >>> clip_binds(ratio, torch.tensor([[1.0]]), clip_low=0.25, clip_high=0.25)
        tensor([[False, False,  True]])
        >>> clip_binds(ratio, torch.tensor([[-1.0]]), clip_low=0.25, clip_high=0.25)
        tensor([[ True, False, False]])
    """
    return ((advantages > 0) & (ratio > 1.0 + clip_high)) | (
        (advantages < 0) & (ratio < 1.0 - clip_low)
    )


def longcat_weight(sigma: Tensor, sigma_guard: Tensor, sqrt_h: Tensor) -> Tensor:
    """Return sqrt(s/(1-d)) / sqrt(h), LongCat's weight of the policy loss. The KL is weighted by
    its square.

    s is `sigma`, and d is `sigma_guard`, which differs from s only at the first step (`FlowSDE`).
    sqrt(s/(1-d)) is `FlowSDE`'s std at noise level 1 without its bound. So the weight cancels the
    factor sqrt(h)/std of the gradient. From ModelTC/GenRL genrl/trainer/wan_trainer.py:624-661,
    82a867e.
    """
    return torch.sqrt(sigma / (1.0 - sigma_guard)) / sqrt_h


def rectified_weight(kernel: Kernel, sigmas: Tensor, steps: Tensor) -> Tensor:
    """Return [K]: 1 / (sqrt(h)/std + std*sqrt(h)*(1-s)/(2s)) at `steps` [K], in units of its mean
    over all steps of `sigmas` [T+1] but the last.

    The weight cancels the factor by which the gradient of a Gaussian log-prob with respect to the
    velocity depends on time. From Flash-GRPO, arXiv 2605.15980; Shredded-Pork/Flash-GRPO
    scripts/train_wanx2_1_flash.py:983 at 4211013 divides by the mean over the batch.
    """
    # [T-1] each. The last step is left out: its next sigma is 0, and it is never trained.
    sigma, following, guard = step_sigmas(
        sigmas, torch.arange(len(sigmas) - 2, device=sigmas.device)
    )
    # [T-1, 1]. std and sqrt(h) depend on the sigmas alone, so any latents do.
    nothing = torch.zeros_like(sigma)[:, None]
    made = kernel.transition(nothing, nothing, sigma, following, guard, next_latents=nothing)
    weight = 1 / (made.sqrt_h / made.std + made.std * made.sqrt_h * (1 - sigma) / (2 * sigma))
    return (weight / weight.mean())[steps]


def gaussian_kl(mean: Tensor, reference_mean: Tensor, scale: Tensor) -> Tensor:
    """Return KL(N(mean, S^2) || N(reference_mean, S^2)) per dimension, [b, K]:
    mean_dims((mean-ref)^2) / (2*S^2).

    mean, reference_mean [b, K, *L]; scale [b, K] S = std*sqrt(h). The true Gaussian KL, as
    ModelTC/GenRL wan_trainer.py:649-661 has it; its weights are 3e-4 .. 4e-3 there.
    """
    return mean_dims((mean - reference_mean) ** 2) / (2.0 * scale**2)


def h_free_kl(mean: Tensor, reference_mean: Tensor, std: Tensor) -> Tensor:
    """Return mean_dims((mean-ref)^2) / (2*std^2), [b, K]. std lacks sqrt(h), so this is h times
    `gaussian_kl`.

    yifan123/flow_grpo train_sd3.py:895 uses this with weight 0.04 (OCR, GenEval) or 0.01
    (PickScore). At 10 steps h is about 0.1, so 0.04 here is about 0.004 for `gaussian_kl`.
    """
    return mean_dims((mean - reference_mean) ** 2) / (2.0 * std**2)


def mean_square_kl(mean: Tensor, reference_mean: Tensor) -> Tensor:
    """Return mean_dims((mean-ref)^2), [b, K], the form without a variance that ModelTC/GenRL pairs
    with Flow-CPS's log-prob."""
    return mean_dims((mean - reference_mean) ** 2)
