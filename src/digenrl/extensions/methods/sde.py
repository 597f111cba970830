"""Transition kernels of single publications; conventions and symbols are those of
`digenrl.diffusion.sde`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from digenrl.diffusion.sde import Kernel, euler_maruyama_mean


@dataclass(frozen=True)
class DanceSDE(Kernel):
    """DanceGRPO SDE (arXiv 2505.07818): constant std = eta, mean = x + v*dt - eta^2/2*score*dt,
    score = -eps_hat/s.

    Equal to `FlowSDE`'s step with std := eta; needs no guard at the first step (XueZeyue/DanceGRPO
    train_grpo_flux.py:131).
    """

    level: ClassVar[str] = "eta"
    eta: float = 0.3
    """0.3 for images and SkyReels, 0.25 for HunyuanVideo (DanceGRPO scripts/finetune)."""

    def moments(
        self, x: Tensor, v: Tensor, s: Tensor, s1: Tensor, guard: Tensor, sqrt_h: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the moments of `Kernel.moments`; `guard` is not used."""
        std = torch.full_like(s, self.eta)
        return euler_maruyama_mean(x, v, s, s1, std), std, std * sqrt_h


@dataclass(frozen=True)
class LinearSDE(Kernel):
    """Noise in proportion to sigma, std = a*s: Flow-GRPO's Wan kernel, as its public copies have it
    (zhtmike/flow_grpo flow_grpo/diffusers_patch/wan_pipeline_with_logprob.py at def7b84,
    Fuzm7/FlowAWR the same file at 05e993a).

    They interpolate sigma_min + (sigma_max - sigma_min)*s with sigma_max = sigmas[1] and sigma_min
    = 0. The mean is `FlowSDE`'s; std is finite everywhere, so the first step needs no guard.
    """

    noise_level: float = 0.983
    """a: sigmas[1] of the grid there; 0.983 for 20 steps with a shift of 3."""

    def moments(
        self, x: Tensor, v: Tensor, s: Tensor, s1: Tensor, guard: Tensor, sqrt_h: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the moments of `Kernel.moments`; `guard` is not used."""
        std = self.noise_level * s
        return euler_maruyama_mean(x, v, s, s1, std), std, std * sqrt_h


@dataclass(frozen=True)
class FlowCPS(Kernel):
    """Flow-CPS, coefficient-preserving sampling (arXiv 2509.05952): sig = s1*sin(a*pi/2),
    mean = (1-s1)*x0_hat + s1*cos(a*pi/2)*eps_hat, x' = mean + sig*z, log-prob = -mean((x'-mean)^2).

    The log-prob has neither variance nor constants (ModelTC/GenRL
    wan_pipeline_with_logprob.py:113), so its log-ratios are 2*sig^2 times the Gaussian ones and
    clip ranges do not transfer from `FlowSDE`. At the last step sig = 0.
    """

    gaussian: ClassVar[bool] = False
    noise_level: float = 0.8
    """a in [0, 1]. 0.8 is recommended by yifan123/flow_grpo's README ("Training Speed")."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_level > 1:
            raise ValueError(
                "FlowCPS noise_level is an angle in quarter turns and must be in 0..1, got "
                f"{self.noise_level}: use 0.8"
            )

    def moments(
        self, x: Tensor, v: Tensor, s: Tensor, s1: Tensor, guard: Tensor, sqrt_h: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the moments of `Kernel.moments`; `guard` is not used, and S is sig."""
        angle = self.noise_level * math.pi / 2
        scale = s1 * math.sin(angle)
        mean = (1.0 - s1) * (x - s * v) + s1 * math.cos(angle) * (x + (1.0 - s) * v)
        return mean, scale / sqrt_h, scale
