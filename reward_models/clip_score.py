"""Prompt alignment: the cosine of CLIP's picture and text embeddings (CLIPScore, arXiv:2104.08718,
without its 2.5).

The cosine is not clipped at 0, so that a bad picture still has a ranking; a typical good picture
scores 0.25-0.35.
"""

from __future__ import annotations

from reward_models.clip_backbone import CosineScorer


class ClipScore(CosineScorer):
    """Cosine in [-1, 1]; arguments in `CosineScorer`."""

    name = "clip_score"
