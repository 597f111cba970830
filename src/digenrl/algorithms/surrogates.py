"""Contribution of a cell to the policy gradient: the clipped ratio and its variants.
`algorithm.surrogate` in YAML.

All work on mean-per-dimension log-probs (`diffusion.sde`). `old_log_prob` is always the one that
the rollout rank stored, so an on-policy ratio is exactly 1 and a stale one is the true importance
ratio per dimension. Other corrections of stale samples are in `extensions/offpolicy`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from digenrl.algorithms.objectives import (
    clip_binds,
    clipped_surrogate,
    dppo_keep,
    gaussian_kl,
    guard_ratio,
)


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

    needs_means: ClassVar[bool] = False
    """Whether rollouts must store their means."""
    needs_proximal: ClassVar[bool] = False
    """Whether log-probs at the beginning of the logical batch are needed."""
    needs_gaussian: ClassVar[bool] = False
    """Whether the kernel's log-prob must be a Gaussian log-density (false for Flow-CPS)."""

    @abstractmethod
    def loss(self, cells: Cells) -> Tensor:
        """Return [b, K], to be summed; its gradient is the update."""

    def cut(self, cells: Cells) -> Tensor:
        """Return [b, K] bool: cells whose gradient or weight the surrogate bounds or drops
        (`clip_fraction`); here none."""
        return torch.zeros_like(cells.log_prob, dtype=torch.bool)


@dataclass(frozen=True)
class Clipped(Surrogate):
    """PPO clip against the rollout's own log-probs (Flow-GRPO, DanceGRPO, MixGRPO): off-policy, the
    behaviour-policy ratio."""

    def loss(self, cells: Cells) -> Tensor:
        """See `objectives.clipped_surrogate`."""
        return clipped_surrogate(cells.ratio, cells.advantages, *cells.clip)

    def cut(self, cells: Cells) -> Tensor:
        """Return [b, K] bool: cells at which the clip binds."""
        return clip_binds(cells.ratio, cells.advantages, *cells.clip)


@dataclass(frozen=True)
class Guard(Surrogate):
    """GRPO-Guard (arXiv 2510.22319): normalised ratio, gradient of each step divided by its own h.

    verl-omni divides by batch-mean S and h (diffusion_algos.py:527), Flow-Factory leaves 1/h out;
    both are per row here.
    """

    needs_means: ClassVar[bool] = True
    needs_gaussian: ClassVar[bool] = True

    def loss(self, cells: Cells) -> Tensor:
        """clipped_surrogate(guard ratio) / h."""
        return (
            clipped_surrogate(self._ratio(cells), cells.advantages, *cells.clip) / cells.sqrt_h**2
        )

    def cut(self, cells: Cells) -> Tensor:
        """Return [b, K] bool: cells at which the clip of the normalised ratio binds."""
        return clip_binds(self._ratio(cells), cells.advantages, *cells.clip)

    def _ratio(self, cells: Cells) -> Tensor:
        assert cells.old_mean is not None
        return guard_ratio(
            cells.log_prob, cells.old_log_prob, cells.mean, cells.old_mean, cells.scale
        )


@dataclass(frozen=True)
class FlowDPPO(Surrogate):
    """Flow-DPPO: unclipped -A*r, without the cells that have left the KL trust region and would be
    pushed further out."""

    threshold: float = 1e-5
    """tau of the mean-reduced KL to the rollout's mean (Tencent-Hunyuan/UniRL
    algorithms/flowdppo.py:54). Means are kept in fp32: bf16 means put a floor of about tau under
    the KL."""

    def __post_init__(self) -> None:
        if self.threshold <= 0:
            raise ValueError(
                f"FlowDPPO.threshold must be positive, got {self.threshold}: UniRL uses 1e-5"
            )

    needs_means: ClassVar[bool] = True

    def loss(self, cells: Cells) -> Tensor:
        """-A*r where kept, else exactly 0 with finite gradient, even for an infinite ratio."""
        keep = ~self.cut(cells)
        # The log-ratio is masked before exp: masking after it would leave inf * 0 in the backward
        # pass.
        log_ratio = torch.where(keep, cells.log_prob - cells.old_log_prob, 0.0)
        return torch.where(keep, -cells.advantages * torch.exp(log_ratio), 0.0)

    @torch.no_grad()
    def cut(self, cells: Cells) -> Tensor:
        """Return [b, K] bool: cells that are left out."""
        assert cells.old_mean is not None
        kl = gaussian_kl(cells.mean, cells.old_mean, cells.scale)
        return ~dppo_keep(cells.ratio, cells.advantages, kl, self.threshold)
