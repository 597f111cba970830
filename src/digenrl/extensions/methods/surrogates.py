"""Surrogates of single publications (`digenrl.algorithms.surrogates`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from digenrl.algorithms.objectives import (
    clip_binds,
    clipped_surrogate,
    gaussian_kl,
)
from digenrl.algorithms.surrogates import Cells, Surrogate


def guard_ratio(
    log_prob: Tensor, old_log_prob: Tensor, mean: Tensor, old_mean: Tensor, scale: Tensor
) -> Tensor:
    """Return GRPO-Guard's normalised ratio exp((log r + bias) * S), [b, K], with bias =
    mean_dims((mean-old)^2)/(2*S^2).

    The value equals exp(mean_dims(z*(mean-old))). Its logarithm has expectation 0, while that of a
    plain ratio has -bias. From GRPO-Guard, arXiv 2510.22319; verl-project/verl-omni
    diffusion_algos.py:527. scale [b, K] is each row's own S: a batch may mix timesteps.
    """
    bias = gaussian_kl(mean, old_mean, scale)
    return torch.exp((log_prob - old_log_prob + bias) * scale)


def dppo_keep(ratio: Tensor, advantages: Tensor, kl: Tensor, threshold: float) -> Tensor:
    """Return Flow-DPPO's mask, [b, K] bool. It is False for a cell beyond the trust region that
    would be pushed further out.

    A cell is dropped if kl >= threshold and ((r > 1 and A > 0) or (r < 1 and A < 0)). kl is
    `gaussian_kl` to the rollout's mean. From Tencent-Hunyuan/UniRL algorithms/flowdppo.py:54-138,
    with threshold 1e-5 for the mean-reduced KL.
    """
    outward = ((ratio > 1.0) & (advantages > 0)) | ((ratio < 1.0) & (advantages < 0))
    return ~((kl >= threshold) & outward)


@dataclass(frozen=True)
class Guard(Surrogate):
    """GRPO-Guard (arXiv 2510.22319): normalised ratio, gradient of each step divided by its own h.

    verl-omni divides by batch-mean S and h (diffusion_algos.py:527), Flow-Factory leaves 1/h out;
    both are per row here.
    """

    needs_means: ClassVar[bool] = True
    needs_gaussian: ClassVar[bool] = True

    def loss(self, cells: Cells) -> Tensor:
        """Return clipped_surrogate(guard ratio) / h."""
        return (
            clipped_surrogate(self._guarded_ratio(cells), cells.advantages, *cells.clip)
            / cells.sqrt_h**2
        )

    def bounded_cells(self, cells: Cells) -> Tensor:
        """Return [b, K] bool: cells at which the clip of the normalised ratio binds."""
        return clip_binds(self._guarded_ratio(cells), cells.advantages, *cells.clip)

    def _guarded_ratio(self, cells: Cells) -> Tensor:
        assert cells.old_mean is not None
        return guard_ratio(
            cells.log_prob, cells.old_log_prob, cells.mean, cells.old_mean, cells.scale
        )


@dataclass(frozen=True)
class FlowDPPO(Surrogate):
    """Flow-DPPO: unclipped -A*r, without the cells that have left the KL trust region and would be
    pushed further out."""

    clips: ClassVar[bool] = False
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
        """Return -A*r for kept cells. Others give exactly 0 with a finite gradient, even for an
        infinite ratio."""
        keep = ~self.bounded_cells(cells)
        # The log-ratio is masked before exp: masking after it would leave inf * 0 in the backward
        # pass.
        log_ratio = torch.where(keep, cells.log_prob - cells.old_log_prob, 0.0)
        return torch.where(keep, -cells.advantages * torch.exp(log_ratio), 0.0)

    @torch.no_grad()
    def bounded_cells(self, cells: Cells) -> Tensor:
        """Return [b, K] bool: cells that are left out."""
        assert cells.old_mean is not None
        kl = gaussian_kl(cells.mean, cells.old_mean, cells.scale)
        return ~dppo_keep(cells.ratio, cells.advantages, kl, self.threshold)
