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
    """PPO's pessimistic loss max(-A*r, -A*clamp(r, 1-low, 1+high)); [b, K] from ratio [b, K],
    advantages broadcastable to it.

    high defaults to low. Schulman et al. 2017, arXiv 1707.06347; per denoising step as in
    yifan123/flow_grpo train_sd3.py:880-893.
    """
    upper = 1.0 + (clip_low if clip_high is None else clip_high)
    # The larger loss is the smaller objective: beyond a bound there is nothing more to win.
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1.0 - clip_low, upper))


def clip_binds(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Return [b, K] bool: where `clipped_surrogate` is flat. A ratio beyond the other bound keeps
    its gradient, so this is less than the share of ratios outside the range, which
    yifan123/flow_grpo logs as `clipfrac`."""
    return ((advantages > 0) & (ratio > 1.0 + clip_high)) | (
        (advantages < 0) & (ratio < 1.0 - clip_low)
    )


def longcat_weight(sigma: Tensor, sigma_guard: Tensor, sqrt_h: Tensor) -> Tensor:
    """sqrt(s/(1-d)) / sqrt(h): what LongCat multiplies the policy loss by, and the KL by its
    square.

    `FlowSDE`'s std at noise level 1, without its bound, over sqrt(h): it takes the factor
    sqrt(h)/std out of the gradient (ModelTC/GenRL genrl/trainer/wan_trainer.py:624-661, 82a867e).
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
    """KL(N(mean, S^2) || N(reference_mean, S^2)) per dimension: mean_dims((mean-ref)^2) / (2*S^2),
    [b, K].

    mean, reference_mean [b, K, *L]; scale [b, K] S = std*sqrt(h). The true Gaussian KL, as
    ModelTC/GenRL wan_trainer.py:649-661 has it; its weights are 3e-4 .. 4e-3 there.
    """
    return mean_dims((mean - reference_mean) ** 2) / (2.0 * scale**2)


def h_free_kl(mean: Tensor, reference_mean: Tensor, std: Tensor) -> Tensor:
    """mean_dims((mean-ref)^2) / (2*std^2), [b, K], std without sqrt(h): h times `gaussian_kl`.

    yifan123/flow_grpo train_sd3.py:895 uses this with weight 0.04 (OCR, GenEval) or 0.01
    (PickScore); at 10 steps that is the weight of a true KL of about a tenth.
    """
    return mean_dims((mean - reference_mean) ** 2) / (2.0 * std**2)


def mean_square_kl(mean: Tensor, reference_mean: Tensor) -> Tensor:
    """mean_dims((mean-ref)^2), [b, K]: the variance-free form that ModelTC/GenRL pairs with
    Flow-CPS's log-prob."""
    return mean_dims((mean - reference_mean) ** 2)
