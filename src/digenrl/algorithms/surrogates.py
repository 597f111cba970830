"""Contribution of a cell to the policy gradient: the clipped ratio and its variants.
`algorithm.surrogate` in YAML.

All work on mean-per-dimension log-probs (`diffusion.sde`). `old_log_prob` is always the one that
the rollout rank stored, so an on-policy ratio is exactly 1 and a stale one is the true importance
ratio per dimension. Other surrogates are in `extensions/methods`, corrections of stale
samples in `extensions/methods/offpolicy`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from digenrl.algorithms.objectives import clip_binds, clipped_surrogate


@dataclass(frozen=True)
class Cells:
    """b x K cells of one block under the present weights."""

    log_prob: Tensor
    """[b, K], differentiable."""
    old_log_prob: Tensor
    """[b, K], stored by the rollout rank."""
    advantages: Tensor
    """[b, 1]."""
    mean: Tensor
    """[b, K, *L], differentiable."""
    scale: Tensor
    """[b, K] S = std*sqrt(h) of each row."""
    sqrt_h: Tensor
    """[b, K]."""
    clip: tuple[float, float]
    """(low, high) distances of the clip bounds from 1."""
    old_mean: Tensor | None = None
    """[b, K, *L] rollout means, if `needs_means`."""
    proximal_log_prob: Tensor | None = None
    """[b, K] under the weights at the beginning of the logical batch, if `needs_proximal`; not
    differentiable."""

    @property
    def ratio(self) -> Tensor:
        """[b, K] exp(new - stored)."""
        return torch.exp(self.log_prob - self.old_log_prob)


class Surrogate(ABC):
    """Per-cell policy loss, and what it needs beyond log-probs."""

    clips: ClassVar[bool] = True
    """Whether `clip_range` bounds the ratio of its cells."""
    needs_means: ClassVar[bool] = False
    """Whether rollouts must store their means."""
    needs_proximal: ClassVar[bool] = False
    """Whether log-probs at the beginning of the logical batch are needed."""
    needs_gaussian: ClassVar[bool] = False
    """Whether the kernel's log-prob must be a Gaussian log-density (false for Flow-CPS)."""

    @abstractmethod
    def loss(self, cells: Cells) -> Tensor:
        """Return [b, K], to be summed; its gradient is the update."""

    def bounded_cells(self, cells: Cells) -> Tensor:
        """Return [b, K] bool: cells whose gradient or weight the surrogate bounds or drops
        (`clip_fraction`); here none."""
        return torch.zeros_like(cells.log_prob, dtype=torch.bool)


@dataclass(frozen=True)
class Clipped(Surrogate):
    """PPO clip against the rollout's own log-probs (Flow-GRPO, DanceGRPO, MixGRPO): off-policy, the
    behaviour-policy ratio."""

    def loss(self, cells: Cells) -> Tensor:
        """Return `objectives.clipped_surrogate`."""
        return clipped_surrogate(cells.ratio, cells.advantages, *cells.clip)

    def bounded_cells(self, cells: Cells) -> Tensor:
        """Return [b, K] bool: cells at which the clip binds."""
        return clip_binds(cells.ratio, cells.advantages, *cells.clip)
