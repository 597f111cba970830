"""What the training of every committed base model shares: the loop, samples, and a file that is
whole or absent."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from digenrl.diffusion.sigmas import static_shift
from digenrl.extensions.tasks.digits import EmbeddedPolicy

Batch = tuple[Tensor, dict[str, Tensor]]
"""Clean latents [B, N, C], and the conditioning of their captions."""


def train(
    policy: EmbeddedPolicy,
    batches: Iterable[Batch],
    generator: torch.Generator,
    optimizers: Sequence[torch.optim.Optimizer],
    rate: Callable[[int], float] = lambda step: 1.0,
    clip: float = math.inf,
    decay: Callable[[int], float] = lambda step: 0.0,
) -> None:
    """Train by flow matching, one step a batch: regress eps - x0 at sigma ~
    shift(logit-normal(0, 1)) (SD3, arXiv:2403.03206, 3.1).

    Args:
        generator: draws noise and sigmas, after the batch.
        rate: factor of the optimizers' learning rates at a step.
        clip: largest norm of the gradient.
        decay: decay of the moving average of the weights at a step; the policy ends with the
            average, which is the last weights at a decay of 0.
    """
    network, started, losses = policy.transformer, time.monotonic(), list[float]()
    average = {name: value.clone() for name, value in network.state_dict().items()}
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    for step, (clean, condition) in enumerate(batches):
        noise = torch.randn(clean.shape, generator=generator)
        sigmas = torch.sigmoid(torch.randn(len(clean), generator=generator))
        sigmas = static_shift(sigmas, policy.shift)
        latents = torch.lerp(clean, noise, sigmas[:, None, None])
        loss = functional.mse_loss(policy.velocity(latents, sigmas, condition), noise - clean)
        network.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), clip)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        for name, value in network.state_dict().items():
            average[name].lerp_(value, 1 - decay(step))
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            told = f"step {step + 1} loss {sum(losses) / len(losses):.4f}"
            print(f"{told} {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
            losses.clear()
    network.load_state_dict(average)


def sampled(policy: EmbeddedPolicy, condition: dict[str, Tensor], steps: int, seed: int) -> Tensor:
    """Return media of `condition`, whose leading dimension is their number, by the plain Euler
    ODE."""
    rows = len(condition["text"])
    latents = torch.randn(rows, *policy.latent_shape, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for sigma, after in itertools.pairwise(policy.sigma_grid(steps)):
            latents = latents + (after - sigma) * policy.velocity(
                latents, sigma.expand(rows), condition
            )
        return policy.codec.decode(latents)


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write safetensors under a temporary name, then rename, so that a stopped run never leaves
    half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    save_file({key: value.detach().contiguous() for key, value in tensors.items()}, unfinished)
    unfinished.chmod(0o644)
    unfinished.replace(path)
    print(f"wrote {path} ({path.stat().st_size / 2**20:.2f} MiB)", file=sys.stderr)
