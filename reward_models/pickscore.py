"""Human preference: PickScore (arXiv:2305.01569), a CLIP-H tuned on pairs that people chose
between.

Score = exp(logit_scale) x cosine / 26, which puts pictures around 0.8-0.9: the scaling of Flow-GRPO
(yifan123/flow_grpo `flow_grpo/pickscore_scorer.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from digenrl.types import Prompt
from reward_models.clip_backbone import CosineScorer

_SCALE = 26.0


class PickScore(CosineScorer):
    """Scaled preference logit; arguments in `CosineScorer`."""

    name = "pickscore"

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return [B] scores."""
        return self.clip.logit_scale * super().__call__(media, prompts) / _SCALE
