"""Losses of the forward-process methods, as pure tensor functions; shapes as in
`digenrl.algorithms.objectives`."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as functional
from torch import Tensor

from digenrl.algorithms.objectives import mean_dims

MatchingKind = Literal["ghuber", "huber", "uniform", "t", "t2"]
"""How `matching_value` weighs the error of a noise level."""
_SMALL = 1e-10
"""Keeps the roots of an error of 0 differentiable."""


def nft_reward_weight(advantages: Tensor, max_advantage: float) -> Tensor:
    """Optimality probability clamp(clamp(A, -M, M)/(2M) + 1/2, 0, 1): 1 at A = M, 1/2 at 0, 0 at -M
    (DiffusionNFT, arXiv 2509.16117; verl-project/verl-omni diffusion_algos.py:795)."""
    return (advantages.clamp(-max_advantage, max_advantage) / max_advantage / 2.0 + 0.5).clamp(
        0.0, 1.0
    )


def nft_loss(
    velocity: Tensor,
    old_velocity: Tensor,
    noisy: Tensor,
    clean: Tensor,
    sigma: Tensor,
    advantages: Tensor,
    beta: float,
    max_advantage: float,
) -> Tensor:
    """Return DiffusionNFT's forward-process loss (rw*P + (1-rw)*N) * M/b per cell, [b, K].

        v+ = b*v + (1-b)*v_old        v- = (1+b)*v_old - b*v        X+- = x_t - t*v+-
        P, N = mean_dims((X+- - x0)^2) / w+-        w+- = max(mean_dims|X+- - x0|, 1e-5)

    w+- carries no gradient and is taken in fp64. At v = v_old the gradient is A times that of the
    adaptively weighted x0 loss, whatever b is.

    velocity, old_velocity, noisy (x_t), clean (x0) [b, K, *L] (clean broadcastable); sigma,
    advantages broadcastable to [b, K].
    """
    rw = nft_reward_weight(advantages, max_advantage)
    t = sigma.reshape(*sigma.shape, *([1] * (noisy.ndim - sigma.ndim)))

    def normalised_error(v: Tensor) -> Tensor:
        difference = noisy - t * v - clean
        scale = mean_dims(difference.detach().double().abs()).clamp(min=1e-5)
        return mean_dims(difference**2) / scale.to(difference.dtype)

    positive = normalised_error(beta * velocity + (1.0 - beta) * old_velocity)
    negative = normalised_error((1.0 + beta) * old_velocity - beta * velocity)
    return (rw * positive + (1.0 - rw) * negative) * (max_advantage / beta)


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    beta: float,
) -> Tensor:
    """Return Diffusion-DPO's loss -logsigmoid(-beta/2*((e_w - e_w_ref) - (e_l - e_l_ref))), with e
    = mean_dims((v - (eps - x0))^2).

    From Wallace et al. 2023, arXiv 2311.12908; yifan123/flow_grpo train_sd3_dpo.py:885-939 (beta
    100). All tensors are [pairs, K]. The loss is log 2 where the policy equals its reference.
    """
    return -functional.logsigmoid(
        -0.5 * beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    )


def flow_matching_loss(velocity: Tensor, noise: Tensor, clean: Tensor) -> Tensor:
    """Return mean_dims((v - (eps - x0))^2), [b, K]: flow matching on data.

    From Lipman et al. 2022, arXiv 2210.02747, and SD3, arXiv 2403.03206. Unweighted, as in
    Tencent-Hunyuan/UniRL algorithms/sft.py (`FlowMatchSFT`).

    velocity, noise [b, K, *L]; clean (x0) broadcastable to them.
    """
    return mean_dims((velocity - (noise - clean)) ** 2)


def matching_value(
    velocity: Tensor, target: Tensor, sigma: Tensor, kind: MatchingKind, power: float = 0.25
) -> Tensor:
    """Return what AWM has in the place of a log-prob, [b, K] fp64.

    With e = mean_dims((v - (eps - x0))^2) and d = 1e-10, the value is by `kind`:

        ghuber            -t * ((e + d)^p - d^p) / p
        huber             -t * (sqrt(e + d) - sqrt(d))
        uniform, t, t2    -e, -t * e, -t^2 * e

    From AWM, arXiv 2509.25050; scxue/advantage_weighted_matching scripts/train_sd3_awm.py:232-252
    (ghuber, 0.25). velocity, target (eps - x0) [b, K, *L]; sigma broadcastable to [b, K].
    """
    error, t = mean_dims((velocity.double() - target.double()) ** 2), sigma.double()
    if kind == "ghuber":
        return -t * ((error + _SMALL) ** power - _SMALL**power) / power
    if kind == "huber":
        return -t * (torch.sqrt(error + _SMALL) - _SMALL**0.5)
    return -error * t ** {"uniform": 0, "t": 1, "t2": 2}[kind]


def dgpo_weight(distance: Tensor, base: Tensor, advantages: Tensor, beta: float) -> Tensor:
    """Return DGPO's weight of a group, sigmoid(beta * mean_G(A * (d - d_base))), [1, K].

    The weight is 1/2 if the policy equals its base. It is less if the policy already fits the
    group's good samples better than the base does.

    From arXiv 2510.08425; Luo-Yihong/DGPO scripts/train_sd3_dgpo.py:162-193 (beta 100). Shapes:
    distance and base [G, K] errors without gradient; advantages [G, 1].
    """
    return torch.sigmoid(beta * (advantages * (distance - base)).mean(dim=0, keepdim=True))


def rvm_loss(
    velocity: Tensor,
    target: Tensor,
    coefficient: Tensor,
    reference: Tensor | None,
    anchor: float,
) -> Tensor:
    """Return mean_dims((v - (v - g))^2) / 2, [b, K], in which v - g carries no gradient.

    So the gradient is g = c*(v - (eps - x0)) + anchor*(v - v_base), as that of a signed matching
    loss. The value of such a loss itself would have no lower bound where c < 0.

    hao-ai-lab/FastVideo rvm_utils.py `detached_rvm_surrogate`. velocity, target, reference [b, K,
    *L]; coefficient c broadcastable to [b, K], or to [b, K, tokens].
    """
    held = velocity.detach()
    c = coefficient.reshape(*coefficient.shape, *([1] * (velocity.ndim - coefficient.ndim)))
    gradient = c * (held - target)
    if reference is not None:
        gradient = gradient + anchor * (held - reference)
    return 0.5 * mean_dims((velocity - (held - gradient)) ** 2)
