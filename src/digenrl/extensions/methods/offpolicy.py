"""The off-policy set that ROLL Flash (arXiv 2510.11345) compares, beside the ratio against the
behaviour policy (`Clipped`): decoupled PPO, truncated importance sampling, CISPO, TOPR, and none.

Their published thresholds are for joint ratios of one token. A per-dimension ratio of a latent is
1 +- 1e-5, where a cap of 2 never binds. Thresholds here are therefore distances from 1 in the unit
of `clip_range`, and default to it.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from digenrl.algorithms.objectives import clip_binds, clipped_surrogate
from digenrl.algorithms.surrogates import Cells, Surrogate


class Weighted(Surrogate):
    """Gradient -w*A*grad(log-prob) with a weight w that carries no gradient."""

    @abstractmethod
    def cell_weights(self, cells: Cells, ratio: Tensor) -> Tensor:
        """Return w [b, K] for a ratio [b, K], whose gradient is cut."""

    def loss(self, cells: Cells) -> Tensor:
        """Return -w*A*exp(log-prob - the log-prob without gradient)."""
        unit = torch.exp(cells.log_prob - cells.log_prob.detach())
        return -self.cell_weights(cells, cells.ratio.detach()) * cells.advantages * unit

    def bounded_cells(self, cells: Cells) -> Tensor:
        """Return [b, K] bool: cells whose weight differs from their ratio."""
        ratio = cells.ratio.detach()
        return self.cell_weights(cells, ratio) != ratio


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

    def weight_cap(self, cells: Cells) -> float:
        """Return 1 + cap."""
        return 1.0 + (cells.clip[1] if self.cap is None else self.cap)


@dataclass(frozen=True)
class Uncorrected(Weighted):
    """Policy gradient that takes stale samples for fresh ones: weight 1."""

    clips: ClassVar[bool] = False

    def cell_weights(self, cells: Cells, ratio: Tensor) -> Tensor:
        """Return 1."""
        return torch.ones_like(ratio)

    def bounded_cells(self, cells: Cells) -> Tensor:
        """Return [b, K] False: nothing is bounded."""
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
        weight, ratio = self._split_ratio(cells)
        return weight.clamp(max=self.weight_cap(cells)) * clipped_surrogate(
            ratio, cells.advantages, *cells.clip
        )

    def bounded_cells(self, cells: Cells) -> Tensor:
        """Return [b, K] bool: cells at which the cap or the clip binds."""
        weight, ratio = self._split_ratio(cells)
        return (weight > self.weight_cap(cells)) | clip_binds(ratio, cells.advantages, *cells.clip)

    def _split_ratio(self, cells: Cells) -> tuple[Tensor, Tensor]:
        """Return exp(prox - old) and exp(new - prox)."""
        assert cells.proximal_log_prob is not None
        correction = torch.exp(cells.proximal_log_prob - cells.old_log_prob)
        return correction, torch.exp(cells.log_prob - cells.proximal_log_prob)


@dataclass(frozen=True)
class TruncatedIS(Capped, Weighted):
    """Truncated importance sampling (Ionides 2008; IMPALA, arXiv 1802.01561): weight min(r, 1 +
    cap)."""

    def cell_weights(self, cells: Cells, ratio: Tensor) -> Tensor:
        """Return min(r, 1 + cap)."""
        return ratio.clamp(max=self.weight_cap(cells))


@dataclass(frozen=True)
class CISPO(Weighted):
    """CISPO (MiniMax-M1, arXiv 2506.13585): weight clamp(r, 1-low, 1+high); no cell loses its
    gradient."""

    def cell_weights(self, cells: Cells, ratio: Tensor) -> Tensor:
        """Return clamp(r, 1-low, 1+high)."""
        return ratio.clamp(1.0 - cells.clip[0], 1.0 + cells.clip[1])


@dataclass(frozen=True)
class TOPR(Weighted):
    """TOPR (arXiv 2503.14286): weight 1 for A > 0, min(r, 1) for A <= 0: bad samples that have
    become unlikely fade out."""

    clips: ClassVar[bool] = False

    def cell_weights(self, cells: Cells, ratio: Tensor) -> Tensor:
        """Return 1 or min(r, 1), by the sign of A."""
        return torch.where(cells.advantages > 0, torch.ones_like(ratio), ratio.clamp(max=1.0))

    def bounded_cells(self, cells: Cells) -> Tensor:
        """Bad samples that have become likelier; good ones have weight 1 by design."""
        return super().bounded_cells(cells) & (cells.advantages <= 0)
