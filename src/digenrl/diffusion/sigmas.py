"""Sigma grids with a static shift, their check, and the sigmas of a step.

t in [0, 1] is the noise level before the shift, T the number of steps. A grid is [T+1] fp32,
strictly decreasing, and ends with 0. It is made once and travels with the trajectory; replay never
makes it again.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def linear_grid(steps: int) -> Tensor:
    """Return t = linspace(1, 0, T+1) in fp64: equal to linspace(1, 1/T, T) with a final 0, the
    pipelines' default.

    Raises:
        ValueError: steps < 1.
    """
    if steps < 1:
        raise ValueError(
            f"a sigma grid needs at least 1 step, got steps={steps}: set sampling.steps >= 1"
        )
    return torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float64)


def static_shift(t: Tensor, shift: float) -> Tensor:
    """Return k*t / (1 + (k-1)*t) (Esser et al. 2024, arXiv 2403.03206, eq. 23; XueZeyue/DanceGRPO
    train_grpo_flux.py:127).

    Example:
        >>> static_shift(linear_grid(4), 3.0).tolist()  # more steps at high noise
        [1.0, 0.9, 0.75, 0.5, 0.0]
    """
    if shift <= 0:
        raise ValueError(
            f"shift must be positive, got {shift}: 1.0 is no shift, SD3 and FLUX use 3.0, Wan 5.0"
        )
    return shift * t / (1.0 + (shift - 1.0) * t)


def static_grid(steps: int, shift: float = 1.0) -> Tensor:
    """Return a grid [T+1] fp32 with a static shift: SD3 and FLUX in DanceGRPO 3.0, Wan and
    HunyuanVideo 5.0.

    Example:
        >>> static_grid(4)
        tensor([1.0000, 0.7500, 0.5000, 0.2500, 0.0000])
        >>> static_grid(4, shift=3.0)  # more steps where there is much noise
        tensor([1.0000, 0.9000, 0.7500, 0.5000, 0.0000])
    """
    return check_grid(static_shift(linear_grid(steps), shift).float())


def check_grid(sigmas: Tensor) -> Tensor:
    """Return `sigmas` if it is a strictly decreasing [T+1] grid inside [0, 1] that ends with 0,
    else raise ValueError."""
    if sigmas.ndim != 1 or sigmas.numel() < 2:
        raise ValueError(f"a sigma grid has shape [T+1] with T >= 1, got {tuple(sigmas.shape)}")
    # One copy to the host: comparing entries on a device would wait for it T times.
    values = sigmas.tolist()
    if values[-1] != 0.0 or values[0] > 1.0 or any(a <= b for a, b in pairwise(values)):
        raise ValueError(f"a sigma grid falls strictly from at most 1 to exactly 0, got {values}")
    return sigmas


def step_sigmas(sigmas: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (sigma, next_sigma, sigma_guard), each [B], of rows at denoising steps `steps` [B]
    int64 of one grid [T+1].

    sigma_guard is sigmas[1] for rows at step 0 and sigma elsewhere. The first step is known by its
    index. A float test `sigma == 1` would miss grids that start at 0.9999 (trap T8 of the field's
    repositories).

    Example:
        >>> step_sigmas(static_grid(4), torch.tensor([0, 2]))
        (tensor([1.0000, 0.5000]), tensor([0.7500, 0.2500]), tensor([0.7500, 0.5000]))
    """
    sigma = sigmas[steps]  # [B]
    return sigma, sigmas[steps + 1], torch.where(steps == 0, sigmas[1], sigma)
