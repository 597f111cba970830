"""First-frame consistency of image-to-video: does the video begin with the picture it was given?

A still of the picture scores 1 as well, so that it belongs beside a reward of what should move.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from digenrl.rewards.protocol import as_frames, as_rgb, require_images, source_images
from digenrl.types import Prompt


class FirstFrame:
    """1 - the mean absolute difference of colour between the first frame and the prompt's `image`,
    in [0, 1]."""

    reads_images = True
    model_id, weights_digest = "first_frame", "none"

    @staticmethod
    def check_prompts(prompts: Sequence[Prompt]) -> None:
        """Raise ValueError for a prompt without `image`."""
        require_images(prompts, "image")

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return scores [B]."""
        first = as_rgb(as_frames(media))[:, 0].float().cpu()
        return 1.0 - (first - source_images(media, prompts)).abs().flatten(1).mean(1)
