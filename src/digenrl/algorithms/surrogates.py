"""Contribution of a cell to the policy gradient: the clipped ratio and its variants.
`algorithm.surrogate` in YAML.

All work on mean-per-dimension log-probs (`diffusion.sde`). `old_log_prob` is always the one that
the rollout rank stored, so an on-policy ratio is exactly 1 and a stale one is the true importance
ratio per dimension. The off-policy set is the one that ROLL Flash (arXiv 2510.11345) compares:
ratio against the behaviour policy (`Clipped`), decoupled PPO, truncated importance sampling, CISPO,
TOPR, and none (`Uncorrected`). Their published thresholds are for joint ratios of one token; a
per-dimension ratio of a latent is 1 +- 1e-5, where a cap of 2 never binds, so thresholds here are
distances from 1 in the unit of `clip_range`, and default to it.
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


class Weighted(Surrogate):
    """Gradient -w*A*grad(log-prob) with a weight w that carries no gradient."""

    @abstractmethod
    def weight(self, cells: Cells, ratio: Tensor) -> Tensor:
        """w [b, K], from the ratio [b, K] without its gradient."""

    def loss(self, cells: Cells) -> Tensor:
        """-w*A*exp(log-prob - itself without gradient)."""
        unit = torch.exp(cells.log_prob - cells.log_prob.detach())
        return -self.weight(cells, cells.ratio.detach()) * cells.advantages * unit

    def cut(self, cells: Cells) -> Tensor:
        """Return [b, K] bool: cells whose weight differs from their ratio."""
        ratio = cells.ratio.detach()
        return self.weight(cells, ratio) != ratio


@dataclass(frozen=True)
class Capped(Surrogate):
    """An importance weight that is cut above."""

    cap: float | None = None
    """Distance of the weight's upper bound from 1; null = clip_range's upper side. verl-omni caps
    at 2.0: a distance of 1.0."""

    def __post_init__(self) -> None:
        if self.cap is not None and self.cap <= 0:
            raise ValueError(
                "cap is the distance of the weight's bound from 1 and must be positive or null, "
                f"got {self.cap}"
            )

    def bound(self, cells: Cells) -> float:
        """1 + cap."""
        return 1.0 + (cells.clip[1] if self.cap is None else self.cap)


@dataclass(frozen=True)
class Uncorrected(Weighted):
    """Policy gradient that takes stale samples for fresh ones: weight 1."""

    def weight(self, cells: Cells, ratio: Tensor) -> Tensor:
        """1."""
        return torch.ones_like(ratio)

    def cut(self, cells: Cells) -> Tensor:
        """None."""
        return torch.zeros_like(cells.log_prob, dtype=torch.bool)


@dataclass(frozen=True)
class DecoupledPPO(Capped):
    """Decoupled PPO (Hilton et al. 2022, arXiv 2110.00641; AReaL, arXiv 2505.24298):
    min(exp(prox - old), 1 + cap) * clipped_surrogate(exp(new - prox)).

    The clip is centred on the weights at the beginning of the logical batch (prox), the weight
    corrects from the rollout's.
    """

    needs_proximal: ClassVar[bool] = True

    def loss(self, cells: Cells) -> Tensor:
        """Reduces to `Clipped` where prox = old."""
        weight, ratio = self._parts(cells)
        return weight.clamp(max=self.bound(cells)) * clipped_surrogate(
            ratio, cells.advantages, *cells.clip
        )

    def cut(self, cells: Cells) -> Tensor:
        """Return [b, K] bool: cells at which the cap or the clip binds."""
        weight, ratio = self._parts(cells)
        return (weight > self.bound(cells)) | clip_binds(ratio, cells.advantages, *cells.clip)

    def _parts(self, cells: Cells) -> tuple[Tensor, Tensor]:
        """exp(prox - old), exp(new - prox)."""
        assert cells.proximal_log_prob is not None
        correction = torch.exp(cells.proximal_log_prob - cells.old_log_prob)
        return correction, torch.exp(cells.log_prob - cells.proximal_log_prob)


@dataclass(frozen=True)
class TruncatedIS(Capped, Weighted):
    """Truncated importance sampling (Ionides 2008; IMPALA, arXiv 1802.01561): weight min(r, 1 +
    cap)."""

    def weight(self, cells: Cells, ratio: Tensor) -> Tensor:
        """min(r, 1 + cap)."""
        return ratio.clamp(max=self.bound(cells))


@dataclass(frozen=True)
class CISPO(Weighted):
    """CISPO (MiniMax-M1, arXiv 2506.13585): weight clamp(r, 1-low, 1+high); no cell loses its
    gradient."""

    def weight(self, cells: Cells, ratio: Tensor) -> Tensor:
        """clamp(r, 1-low, 1+high)."""
        return ratio.clamp(1.0 - cells.clip[0], 1.0 + cells.clip[1])


@dataclass(frozen=True)
class TOPR(Weighted):
    """TOPR (arXiv 2503.14286): weight 1 for A > 0, min(r, 1) for A <= 0: bad samples that have
    become unlikely fade out."""

    def weight(self, cells: Cells, ratio: Tensor) -> Tensor:
        """1 or min(r, 1), by the sign of A."""
        return torch.where(cells.advantages > 0, torch.ones_like(ratio), ratio.clamp(max=1.0))

    def cut(self, cells: Cells) -> Tensor:
        """Bad samples that have become likelier; good ones have weight 1 by design."""
        return super().cut(cells) & (cells.advantages <= 0)
