"""Cells of forward-process methods: clean latents noised again to levels of the rollout's sigma
grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from digenrl import keys
from digenrl.diffusion.denoise import expand_condition
from digenrl.models.policy import Policy
from digenrl.types import CellBlock


@dataclass(frozen=True)
class NoisedCells:
    """Rows x noise levels of one block."""

    clean: Tensor
    """[rows, 1, *L] fp32: x0."""
    noise: Tensor
    """[rows, K, *L] fp32: eps."""
    sigma: Tensor
    """[K], or [rows, K] where rows have levels of their own; fp32: t."""
    condition: dict[str, Tensor]
    """Leading dimension 1."""

    @property
    def noisy(self) -> Tensor:
        """[rows, K, *L]: x_t = (1-t)*x0 + t*eps."""
        t = self.sigma.reshape(-1, self.noise.shape[1], *([1] * (self.noise.ndim - 2)))
        return (1.0 - t) * self.clean + t * self.noise

    @property
    def target(self) -> Tensor:
        """[rows, K, *L]: eps - x0, the exact velocity."""
        return self.noise - self.clean

    def predict_velocity(self, policy: Policy) -> Tensor:
        """Return [rows, K, *L] of the policy at its present weights, one forward. Raises ValueError
        for a family whose parts have different noise levels."""
        if policy.own_levels:
            raise ValueError(
                f"{policy.family}: a part of its samples has noise levels of its own, and clean "
                "samples are noised to one level here; use an algorithm over stored transitions, "
                "such as algorithm=flow_grpo"
            )
        rows, count = self.noise.shape[:2]
        out = policy.velocity(
            self.noisy.flatten(0, 1),
            self.sigma.expand(rows, count).flatten(),
            expand_condition(self.condition, rows * count),
        )
        return out.unflatten(0, (rows, count))


def noise_cells(
    block: CellBlock,
    rows: Sequence[int],
    noise_of: Sequence[int],
    seed: int,
    stream: str,
    sigma: Tensor | None = None,
) -> NoisedCells:
    """Return rows `rows` of the block at its noise levels, or at `sigma`; row i gets the noise of
    identity `noise_of[i]` (I11: keyed, not drawn).

    Raises ValueError when the block carries no clean latents.
    """
    if block.final is None:
        raise ValueError(
            "a forward-process method needs the samples' clean latents and the block has none: "
            "keep_final=True"
        )
    device = block.final.device
    clean = block.final[torch.as_tensor(rows, device=device)].float()[:, None]
    shape = block.final.shape[1:]
    levels = [
        keys.noise(seed, block.step, block.uid, noise_of, step, shape, stream)
        for step in block.steps.tolist()
    ]
    return NoisedCells(
        clean,
        torch.stack(levels, dim=1).to(device),
        block.sigmas[block.steps].float() if sigma is None else sigma,
        block.condition,
    )


def uniform_levels(block: CellBlock, seed: int) -> Tensor:
    """Return [b, K] noise levels between 0 and 1 for the block's rows, keyed by sample and trained
    step (I11), fp32."""
    levels = [
        [
            keys.generator(seed, "level", block.step, block.uid, number, step).random()
            for step in block.steps.tolist()
        ]
        for number in block.numbers
    ]
    return torch.tensor(levels, dtype=torch.float32, device=block.sigmas.device)
