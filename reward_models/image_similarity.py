"""Preservation: the cosine of CLIP's embeddings of a sample and of the image that it edits
(flow_grpo's `image_similarity`). A copy of the source scores 1, so it belongs beside a reward of
what should have changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from digenrl.rewards.protocol import require_images, source_images
from digenrl.types import Prompt
from reward_models.clip_backbone import CosineScorer


class ImageSimilarity(CosineScorer):
    """Cosine in [-1, 1]; arguments in `CosineScorer`. A video gives the mean of its sampled
    frames."""

    name = "image_similarity"
    reads_images = True

    @staticmethod
    def check_prompts(prompts: Sequence[Prompt]) -> None:
        """Raise ValueError for a prompt without `image`."""
        require_images(prompts, "image")

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return scores [B]."""
        sources = self.clip.images(source_images(media, prompts))
        return (self.clip.frames(media, self._frames) * sources[:, None]).sum(-1).mean(1)
