"""Aesthetics: LAION's predictor, a small head on CLIP ViT-L/14 that was fitted to people's ratings
of 1..10.

Architecture and weights: christophschuhmann/improved-aesthetic-predictor
(`sac+logos+ava1-l14-linearMSE.pth`). Used as a reward by DDPO (arXiv:2305.13301). The rating is
divided by 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from digenrl.types import Prompt
from reward_models.clip_backbone import ClipBackbone
from reward_models.weights import checkpoint, module_digest, read_state

_HEAD_FILE = "head.safetensors"


class AestheticHead(nn.Module):
    """Embedding [N, D] -> rating [N]; module names are the published checkpoints' (ImageReward took
    the head over)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 1024),
            nn.Dropout(0.2),
            nn.Linear(1024, 128),
            nn.Dropout(0.2),
            nn.Linear(128, 64),
            nn.Dropout(0.1),
            nn.Linear(64, 16),
            nn.Linear(16, 1),
        )

    def forward(self, embedding: Tensor) -> Tensor:
        """Ratings [N]."""
        return self.layers(embedding).squeeze(-1)


class Aesthetic:
    """Predicted rating / 10; the prompt does not count. A video scores the mean of its sampled
    frames.

    Args:
        path: CLIP ViT-L/14, directory or hub id.
        head: the head's weights, `.safetensors` or `.pth` (read with weights_only=True).
        build: "real" or "tiny" (CLIP and head).
        frames: frames sampled from a video.
        device: "auto", or as torch reads it.
        dtype: of the CLIP; the head runs in fp32.
    """

    def __init__(
        self,
        path: str | None = "openai/clip-vit-large-patch14",
        head: str | None = None,
        build: str = "real",
        frames: int = 4,
        device: str = "auto",
        dtype: str = "float32",
    ) -> None:
        if build == "real" and head is None:
            raise ValueError(
                "The aesthetic reward needs `head`: the file sac+logos+ava1-l14-linearMSE.pth of "
                "christophschuhmann/improved-aesthetic-predictor, or its safetensors copy."
            )
        self.clip, self.frames = ClipBackbone(path, build, device, dtype), frames
        self.head = AestheticHead(self.clip.width)
        with checkpoint(
            head, build, lambda folder: save_head(AestheticHead(self.clip.width), folder)
        ) as source:
            file = Path(source) / _HEAD_FILE if build == "tiny" else Path(source)
            self.head.load_state_dict(
                read_state(file, "give `head` the path of the downloaded weights")
            )
        self.head.to(self.clip.device).eval().requires_grad_(False)
        self.model_id = f"aesthetic({self.clip.name}, frames={frames})"
        self.weights_digest = module_digest(self.clip.model, self.head)

    @torch.no_grad()
    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return [B] ratings / 10."""
        embeddings = self.clip.frames(media, self.frames)
        return self.head(embeddings).mean(1) / 10


def save_head(head: AestheticHead, folder: Path) -> None:
    """Write `head` where the tiny build looks for it."""
    save_file(head.state_dict(), folder / _HEAD_FILE)
