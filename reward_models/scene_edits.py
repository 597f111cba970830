"""Reward of edits of drawn scenes: the picture shows what it should show then, and the rest is as
it was.

A prompt names its picture (`image`), the scene that the edit makes of it (`target`) and what may
change (`region`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from digenrl.rewards.protocol import require_images, source_images
from digenrl.types import Prompt
from reward_models.drawn_scenes import PAPER, asked_scene
from reward_models.region import outside
from reward_models.scene_judges import OFF_PAPER, SceneDetector

SAME = 0.15
"""A pixel is as it was when its colour is so near to the source's (RGB in [0, 1])."""


class ScenePreserved:
    """Share in [0, 1] of the pixels outside of the region that are as in the source. The paper's
    and the other object's pixels count alike."""

    reads_images = True
    model_id, weights_digest = "scene_preserved", "none"

    @staticmethod
    def check_prompts(prompts: Sequence[Prompt]) -> None:
        """Raise ValueError for a prompt without `image`, whose `target` is no scene, or whose
        `region` is none or everything."""
        require_images(prompts, "image")
        for prompt in prompts:
            if not prompt.target:
                raise ValueError(
                    "it has no target: the scene that the edit makes, as 'a green circle'."
                )
            asked_scene(prompt.target)
            outside(prompt, 24, 24)

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return [B] of pictures [B, 3, 24, 24]."""
        pictures, sources = media.float().cpu(), source_images(media, prompts)
        same = (pictures - sources).norm(dim=1) < SAME
        paper = (sources - PAPER[:, None, None]).norm(dim=1) < OFF_PAPER
        rest = torch.stack([outside(prompt, *media.shape[-2:]) for prompt in prompts])
        shares = [
            (same & part).sum((1, 2)) / part.sum((1, 2)) for part in (rest & paper, rest & ~paper)
        ]
        return torch.stack(shares).nanmean(0)  # of a picture with one object there is no other


class SceneEdit(ScenePreserved):
    """1.0 where the detector confirms all of the edited scene, else 0.0, times `ScenePreserved`."""

    model_id = "scene_edit"

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return [B] of pictures [B, 3, 24, 24]."""
        return SceneDetector(perfect=True)(media, prompts) * super().__call__(media, prompts)
