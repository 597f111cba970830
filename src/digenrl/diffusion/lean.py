"""Log-prob gradients that are taken while a sample is generated, and weighed when its advantage A is known.

Under the weights that generated a sample every ratio is 1, and a policy loss in proportion to A has the gradient
A * sum_k w_k * grad log p_k, where w_k depends on denoising step k alone. The sum is taken from the forwards that make
the sample, one graph after the other, and waits as one tensor per sample and trained parameter: no transition is
computed twice. Autograd sums over the rows of a batch, so adapters take the gradients of several samples apart
(`Policy.samples_apart`); where all weights are trained, a sample is a batch of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from digenrl.diffusion.denoise import Replay
from digenrl.diffusion.sde import Kernel
from digenrl.diffusion.sigmas import step_sigmas
from digenrl.types import CellBlock


def log_probs(block: CellBlock, weights: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """The stored log-probs [b, K] of a block with gradients, as a function of `parameters` that has these gradients
    where the loss weighs them in proportion to `weights` [K], as it did when they were taken."""
    assert block.gradients is not None
    reached = [parameters[name] for name in block.gradients]
    rows = torch.tensor(block.numbers) - block.first_sample
    log_prob: Tensor = _LogProbs.apply(block.log_probs, weights, rows, tuple(block.gradients.values()), *reached)
    return log_prob


def at_rest(block: CellBlock, kernel: Kernel, log_prob: Tensor) -> Replay:
    """A block's transitions under the weights that generated it, without the network: `log_prob` [b, K] stands for
    theirs. The means, where the block has none, and the velocities are 0."""
    rows, count = log_prob.shape
    sigma, next_sigma, guard = step_sigmas(block.sigmas, block.steps.repeat(rows))
    nothing = log_prob.new_zeros(rows * count, 1)
    out = kernel.transition(nothing, nothing, sigma, next_sigma, guard, next_latents=nothing)
    still = nothing.unflatten(0, (rows, count))
    return Replay(
        log_prob=log_prob,
        mean=still if block.means is None else block.means,
        std=out.std.unflatten(0, (rows, count)),
        sqrt_h=out.sqrt_h.unflatten(0, (rows, count)),
        velocity=still,
    )


class _LogProbs(torch.autograd.Function):
    """Stored log-probs; the backward pass weighs stored gradients, of which it takes those at `rows`."""

    @staticmethod
    def forward(
        ctx: Any, stored: Tensor, weights: Tensor, rows: Tensor, gradients: tuple[Tensor, ...], *parameters: Tensor
    ) -> Tensor:
        ctx.weights, ctx.rows, ctx.gradients = weights, rows, gradients
        return stored.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        weights = ctx.weights.to(upstream[0].device)
        largest = weights.abs().argmax()
        scale = upstream[0][:, largest] / weights[largest]

        def weighed(gradients: Tensor) -> Tensor:
            whole = len(scale) == len(gradients)
            kept = gradients if whole else gradients[ctx.rows.to(gradients.device)]
            return torch.tensordot(scale.to(kept.dtype), kept, dims=1)

        return None, None, None, None, *(weighed(gradients) for gradients in ctx.gradients)
