"""Prompt alignment: the cosine of CLIP's picture and text embeddings (CLIPScore, arXiv:2104.08718, without its 2.5).

The cosine is not clipped at 0, so that a bad picture still has a ranking; a typical good picture scores 0.25-0.35.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from digenrl.types import Prompt
from reward_models.clip_backbone import ClipBackbone


class ClipScore:
    """Cosine in [-1, 1]; a video scores the mean of its sampled frames.

    Args:
        path: a CLIP checkpoint, directory or hub id.
        build: "real" or "tiny".
        frames: frames sampled from a video.
        device: "auto", or as torch reads it.
        dtype: of the model.
    """

    def __init__(
        self,
        path: str | None = "openai/clip-vit-large-patch14",
        build: str = "real",
        frames: int = 4,
        device: str = "auto",
        dtype: str = "float32",
    ) -> None:
        self.clip, self.frames = ClipBackbone(path, build, device, dtype), frames
        self.model_id = f"clip_score({self.clip.name}, frames={frames})"
        self.weights_digest = self.clip.digest

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """[B] cosines."""
        texts = self.clip.texts([prompt.text for prompt in prompts])
        return (self.clip.frames(media, self.frames) * texts[:, None]).sum(-1).mean(1)
