"""Distance of a policy from its base model, along trajectories that the policy itself draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from digenrl import keys
from digenrl.diffusion.denoise import expand_condition
from digenrl.diffusion.sde import FlowSDE, Kernel, Transition
from digenrl.diffusion.sigmas import step_sigmas
from digenrl.models.policy import Policy

STREAM = "divergence"
"""Noise stream of the trajectories: never the noise of any rollout or evaluation."""


KERNEL = FlowSDE()
"""Kernel with which every policy is compared, including those trained with ODE samplers, so that
the numbers compare."""


@torch.no_grad()
def noisy_trajectories(
    policy: Policy,
    condition: dict[str, Tensor],
    sigmas: Tensor,
    draw: Callable[[int], Tensor],
    kernel: Kernel = KERNEL,
    before_forward: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """Draw trajectories with noise in every step, and measure how much likelier the policy makes
    them than the base model.

    By the chain rule this is the sum over transitions of their KL divergences, |difference of
    means|^2 / (2 S^2). By the data processing inequality it bounds the divergence of the samples
    themselves from above.

    Args:
        condition: leading dimension 1 or b.
        sigmas: [T+1].
        draw: denoising step, or `keys.INITIAL`, -> its noise [b, *L], on the policy's device.
        kernel: a Gaussian one.
        before_forward: called before each of the 2 T forwards; an exception ends this.

    Returns:
        (samples [b, *L], KL(policy || base) [b] in nats per sample). Inside
        `policy.adapter.reference()`: (base samples, 0).
    """
    latents = draw(keys.INITIAL)  # [b, *L]
    rows, total = len(latents), torch.zeros(len(latents), device=latents.device)
    condition = expand_condition(condition, rows)
    grid = sigmas.to(latents.device)  # [T+1]

    def transition_at(latents: Tensor, step: int, noise: Tensor) -> Transition:
        before_forward()
        sigma, following, guard = step_sigmas(grid, torch.full((rows,), step, device=grid.device))
        velocity = policy.paced(policy.velocity(latents, sigma, condition), sigma, following)
        kept = latents.dtype
        return kernel.transition(
            latents, velocity, sigma, following, guard, noise, None, kept, policy.drawn
        )

    for step in range(len(grid) - 1):
        noise = draw(step)
        # Both from the policy's own latents: the chain rule takes the expectation over its
        # trajectories.
        own = transition_at(latents, step, noise)
        with policy.adapter.reference():
            base = transition_at(latents, step, noise)
        scale = (own.std * own.sqrt_h).reshape(-1, *[1] * (own.mean.dim() - 1))  # [b, 1, ...]
        # Gaussians of equal variance, summed over dimensions and not averaged: nats per sample.
        total += ((own.mean - base.mean) / scale).square().flatten(1).sum(1) / 2
        latents = own.next_latents
    return latents, total


@torch.no_grad()
def measure_divergence(
    policy: Policy,
    batches: Iterable[tuple[dict[str, Tensor], Callable[[int], Tensor]]],
    sigmas: Tensor,
    before_forward: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return KL(policy || base model) [samples] in nats per sample, of one trajectory per row.

    Args:
        batches: conditioning and noise of the rows, as `rollout.engine.fixed_batches` yields them
            for the noise stream `STREAM`.
        sigmas: [T+1], the grid of rollouts.
        before_forward: as in `noisy_trajectories`.
    """
    found = [
        noisy_trajectories(policy, condition, sigmas, draw, before_forward=before_forward)[1]
        for condition, draw in batches
    ]
    return torch.cat(found)
