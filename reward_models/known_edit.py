"""Edits whose right result is known: what should change has changed, and the rest is as it was.

The region is where `image` and `target_image` of a prompt differ, at the size of the samples. Both
scores need a right result for each prompt (drawn scenes, pairs from an editor); for photographs
without one see `image_similarity`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from digenrl.rewards.protocol import as_frames, as_rgb, require_images, source_images
from digenrl.types import Prompt

_SAME = 2 / 255
"""Differences up to two of 255 steps are rounding."""


class _KnownEdit:
    reads_images = True
    weights_digest = "none"

    @staticmethod
    def check_prompts(prompts: Sequence[Prompt]) -> None:
        """Raise ValueError for a prompt without `image` or `target_image`, or where both are one
        picture."""
        require_images(prompts, "image", "target_image")
        for prompt in prompts:
            source, target = (
                {i.digest for i in prompt.images if i.role == role}
                for role in ("image", "target_image")
            )
            if source & target:
                raise ValueError(
                    "its image and its target_image are one file: nothing is to be changed."
                )


class EditDone(_KnownEdit):
    """How far the region has come from the source (0) to the target (1), by mean absolute
    difference of colour.

    Negative where it is further from the target than the source was; a prompt whose pictures do not
    differ at the size of the samples has no score.
    """

    model_id = "edit_done"

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return [B], at most 1."""
        source, target = (source_images(media, prompts, role) for role in ("image", "target_image"))
        region = ((source - target).abs().amax(1, keepdim=True) > _SAME).float()
        missed = _difference(media, target, region)
        return 1.0 - missed / _difference(source, target, region)


class EditKept(_KnownEdit):
    """1 - the mean absolute difference of colour from the source outside the region, in [0, 1]."""

    model_id = "edit_kept"

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return [B]; of a picture whose region is all of it, NaN."""
        source, target = (source_images(media, prompts, role) for role in ("image", "target_image"))
        rest = ((source - target).abs().amax(1, keepdim=True) <= _SAME).float()
        return 1.0 - _difference(media, source, rest)


def _difference(media: Tensor, other: Tensor, region: Tensor) -> Tensor:
    """Return [B] mean over frames, channels and the pixels of `region` [B, 1, H, W]; NaN where it
    has none."""
    frames = as_rgb(as_frames(media)).float().cpu()
    each = (
        ((frames - other.unsqueeze(1)).abs().mean(dim=(1, 2)) * region.squeeze(1)).flatten(1).sum(1)
    )
    pixels = region.flatten(1).sum(1)
    return torch.where(pixels > 0, each / pixels, torch.nan)
