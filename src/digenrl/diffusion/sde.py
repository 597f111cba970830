"""Transition kernels of the denoising chain. Sampling and replay are one code path, so an on-policy
ratio is exactly 1.

Rectified flow, data at 0 and noise at 1: x_s = (1-s)*x0 + s*eps. The network's output is v = eps -
x0. Symbols: s = sigma, s1 = next sigma < s, dt = s1 - s < 0, h = -dt. Estimates: x0_hat = x - s*v,
eps_hat = x + (1-s)*v. Legend of shapes: B rows, *L latent dimensions of any rank ([N, C] packed,
[C, H, W], [C, F, H, W]).

Conventions, one for all kernels:
- Log-probs are *means* over the latent dimensions, so a log-ratio is 1/D of the joint one and clip
  ranges are 1e-6..1e-3.
- `std` excludes sqrt(h). The standard deviation of one step's noise is S = std * sqrt_h.
- The next latent is rounded to the storage dtype *before* its log-prob is taken. The network sees
  the rounded tensor next.
- Arithmetic is fp32 at least (bf16 overflows in the mean: yifan123/flow_grpo
  sd3_sde_with_logprob.py:34). Input in fp64 stays fp64.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Transition:
    """One denoising step of B rows."""

    next_latents: Tensor
    """[B, *L] storage dtype."""
    log_prob: Tensor | None
    """[B] mean-per-dimension log-prob; None where the kernel's noise level is 0 (0/0 must never be
    stored)."""
    mean: Tensor
    """[B, *L] of what is drawn."""
    std: Tensor
    """[B], without sqrt(h)."""
    sqrt_h: Tensor
    """[B]."""


class Kernel(ABC):
    """An SDE. A variant defines `moments`; `transition` samples, rounds, replays and computes
    log-probs for all variants."""

    gaussian: ClassVar[bool] = True
    """True if `log_prob` is the log-density of N(mean, S^2); False for Flow-CPS, which drops the
    variance."""

    level: ClassVar[str] = "noise_level"
    """Name of the field with the noise level."""

    def __post_init__(self) -> None:
        value = getattr(self, self.level)
        if not math.isfinite(value) or value < 0:
            raise ValueError(
                f"{self.level} must be finite and >= 0, got {value}: 0 is the deterministic ODE, "
                "training needs > 0"
            )

    @property
    def stochastic(self) -> bool:
        """Whether the noise level is above 0. Without noise no log-prob exists, and nothing can be
        trained."""
        return bool(getattr(self, self.level) > 0)

    @abstractmethod
    def moments(
        self, x: Tensor, v: Tensor, s: Tensor, s1: Tensor, guard: Tensor, sqrt_h: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (mean, std, S = std*sqrt_h) of the next latent: mean like x [B, *L], the others
        like s [B, 1, ..., 1]."""

    def transition(
        self,
        latents: Tensor,
        velocity: Tensor,
        sigma: Tensor,
        next_sigma: Tensor,
        sigma_guard: Tensor,
        noise: Tensor | None = None,
        next_latents: Tensor | None = None,
        storage_dtype: torch.dtype = torch.float32,
        drawn: int | None = None,
    ) -> Transition:
        """Take one step: sample when `noise` [B, *L] is given, replay when `next_latents` [B, *L]
        is. Give one of the two.

        Shapes: latents and velocity [B, *L], sigma and next_sigma [B], sigma_guard [B] from
        `sigmas.step_sigmas`. The log-prob is differentiable with respect to `velocity` only: the
        next latent counts as data.

        `drawn`: number of leading tokens of packed latents that have noise, mean and log-prob. The
        tokens behind them follow the ODE. None: all tokens are drawn.

        Example:
            >>> x, v = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, -4.0]])
            >>> s = torch.tensor([0.5])
            >>> drawn = FlowSDE(1.0).transition(x, v, s, s / 2, s, noise=torch.ones(1, 2))
            >>> drawn.mean.tolist(), drawn.next_latents.tolist()  # S = std * sqrt(h) = 1 * 0.5
            ([[0.0, 3.0]], [[0.5, 3.5]])
            >>> again = FlowSDE(1.0).transition(x, v, s, s / 2, s, next_latents=drawn.next_latents)
            >>> (again.log_prob - drawn.log_prob).exp().item()  # the ratio before any update
            1.0
        """
        # x, v [B, *L]; s, s1, guard [B, 1, ..., 1], one number a row.
        x, v, s, s1, guard = _widen_inputs(latents, velocity, sigma, next_sigma, sigma_guard)
        sqrt_h = torch.sqrt(s - s1)  # h = -dt > 0
        mean, std, scale = self.moments(x[:, :drawn], v[:, :drawn], s, s1, guard, sqrt_h)
        if (noise is None) == (next_latents is None):
            raise ValueError(
                "transition takes exactly one of noise (to sample) and next_latents (to replay)"
            )
        if noise is not None:
            # x_{s1} = mean + S * eps. `drawn` = None leaves the slice whole, whatever dimension 1
            # is.
            next_latents = mean + scale * noise[:, :drawn].to(mean)
            if drawn is not None:
                next_latents = torch.cat([next_latents, (x + v * (s1 - s))[:, drawn:]], dim=1)
            # Rounded before the log-prob: replay has only the rounded tensor.
            next_latents = next_latents.to(storage_dtype)
        assert next_latents is not None
        log_prob = None
        if self.stochastic:
            log_density = -((next_latents[:, :drawn].to(mean.dtype).detach() - mean) ** 2)
            if self.gaussian:
                # log N(x; mean, S^2) = -(x - mean)^2 / (2 S^2) - log S - log(2 pi) / 2
                log_density = (
                    log_density / (2.0 * scale**2)
                    - torch.log(scale)
                    - 0.5 * math.log(2.0 * math.pi)
                )
            log_prob = log_density.flatten(1).mean(dim=1)  # [B], 1/D of the joint log-prob
        return Transition(next_latents, log_prob, mean, std.flatten(), sqrt_h.flatten())


def ode_step(
    latents: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    next_sigma: Tensor,
    storage_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the Euler step x + v*dt, [B, *L] in the storage dtype: the deterministic limit of
    every kernel here.

    Example:
        >>> x, v = torch.tensor([[2.0]]), torch.tensor([[4.0]])  # [B, *L]
        >>> ode_step(x, v, sigma=torch.tensor([1.0]), next_sigma=torch.tensor([0.75]))
        tensor([[1.]])
    """
    x, v, s, s1 = _widen_inputs(latents, velocity, sigma, next_sigma)
    return (x + v * (s1 - s)).to(storage_dtype)


@dataclass(frozen=True)
class FlowSDE(Kernel):
    """Flow-GRPO SDE (arXiv 2505.05470): std = a*sqrt(s/(1-d)), mean = x + v*dt +
    std^2/(2s)*eps_hat*dt.

    d = s, except at the first step, where d = sigmas[1] (yifan123/flow_grpo
    sd3_sde_with_logprob.py:44). So the noise of the first step has standard deviation a on any
    grid.
    """

    noise_level: float = 0.7
    """Noise level a. Flow-GRPO uses 0.7 for SD3 and Wan2.1, 0.9 for 6-step FLUX, 1.2 for Qwen-Image
    windows."""
    max_scale: float | None = None
    """Upper bound of S = std*sqrt(h), applied before the mean; None = unbounded. LongCat uses 0.45
    (ModelTC/GenRL wan_pipeline_with_logprob.py:81)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_scale is not None and self.max_scale <= 0:
            raise ValueError(
                f"max_scale must be positive or null, got {self.max_scale}: LongCat uses 0.45"
            )

    def moments(
        self, x: Tensor, v: Tensor, s: Tensor, s1: Tensor, guard: Tensor, sqrt_h: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the moments of `Kernel.moments`; `guard` is d."""
        std = self.noise_level * torch.sqrt(s / (1.0 - guard))
        if self.max_scale is not None:
            # S = std * sqrt(h) <= max_scale
            std = torch.minimum(std, self.max_scale / sqrt_h)
        return euler_maruyama_mean(x, v, s, s1, std), std, std * sqrt_h


def euler_maruyama_mean(x: Tensor, v: Tensor, s: Tensor, s1: Tensor, std: Tensor) -> Tensor:
    """Return the mean of a step with noise `std`: x + v*dt + std^2/(2s)*eps_hat*dt."""
    dt = s1 - s
    return x + v * dt + std**2 / (2.0 * s) * (x + (1.0 - s) * v) * dt


def _widen_inputs(x: Tensor, v: Tensor, *sigmas: Tensor) -> tuple[Tensor, ...]:
    """Return everything in fp32 or wider, and the sigmas [B] with latent dimensions of size 1."""
    # bf16 and fp16 become fp32; fp64 stays.
    dtype = torch.promote_types(torch.promote_types(v.dtype, x.dtype), torch.float32)
    x, v = x.to(dtype), v.to(dtype)
    return (x, v, *(rows.to(x).reshape(-1, *([1] * (x.ndim - 1))) for rows in sigmas))
