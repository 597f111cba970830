"""Video quality without a model: statistics of frames and of motion, each in [0, 1], and their
weighted mean.

- sharpness: share of the frames' energy that a 3x3 Laplacian keeps, saturating; blur scores low.
- exposure: 1 - share of pixels that are nearly black or white.
- smoothness: how close a frame is to the mean of its two neighbours; flicker scores low. This is
  the idea of VBench's motion smoothness (arXiv:2311.17982), with linear interpolation in place of a
  learned one.
- motion: mean absolute change between neighbours, saturating: a frozen video scores 0 (VBench's
  dynamic degree).

`smoothness` alone is won by a frozen video and `motion` alone by noise, hence both. Images have no
motion terms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from digenrl.rewards.protocol import laplacian, luma
from digenrl.types import Prompt

TERMS = ("sharpness", "exposure", "smoothness", "motion")
_SHARP, _MOVING, _FLICKER = 0.02, 0.02, 0.05
"""Values at which a term is half saturated (for smoothness: has lost half), in units of the full
pixel range."""


class VideoQuality:
    """Weighted mean in [0, 1] of the terms above.

    Args:
        sharpness: weight of the term; 0 = off. Likewise `exposure`, `smoothness`, `motion`.
    """

    weights_digest = "none"

    def __init__(
        self,
        sharpness: float = 1.0,
        exposure: float = 1.0,
        smoothness: float = 1.0,
        motion: float = 1.0,
    ) -> None:
        self.weights = dict(zip(TERMS, (sharpness, exposure, smoothness, motion), strict=True))
        if min(self.weights.values()) < 0 or not 0 < sum(self.weights.values()) < math.inf:
            raise ValueError(
                f"video_quality weights are {self.weights}: give non-negative numbers, one of them "
                "positive."
            )
        self.model_id = f"video_quality({', '.join(f'{name}={weight}' for name, weight in self.weights.items())})"  # noqa: E501

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return [B]; NaN where every term with a weight needs more frames than the sample has."""
        terms = quality_terms(media)
        weights = {name: self.weights[name] for name in terms}
        total = sum(weights.values())
        if not total:
            return torch.full((len(prompts),), math.nan)
        return torch.stack([weights[name] * value for name, value in terms.items()]).sum(0) / total


def quality_terms(media: Tensor) -> dict[str, Tensor]:
    """Return each term of the module's docstring: name -> [B] in [0, 1]; only those that the number
    of frames allows.

    Args:
        media: [B, C, H, W] or [B, F, C, H, W] in [0, 1].
    """
    frames = luma(media)
    detail = laplacian(frames).abs().mean((1, 2, 3))
    clipped = ((frames < 0.02) | (frames > 0.98)).float().mean((1, 2, 3))
    terms = {"sharpness": detail / (detail + _SHARP), "exposure": 1 - clipped}
    if frames.shape[1] >= 3:
        jump = (frames[:, 1:-1] - (frames[:, :-2] + frames[:, 2:]) / 2).abs().mean((1, 2, 3))
        terms["smoothness"] = _FLICKER / (jump + _FLICKER)
    if frames.shape[1] >= 2:
        change = (frames[:, 1:] - frames[:, :-1]).abs().mean((1, 2, 3))
        terms["motion"] = change / (change + _MOVING)
    return terms
