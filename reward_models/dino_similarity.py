"""Preservation: how alike sample and source are place by place, by a DINOv2's patch features
(arXiv:2304.07193).

Where CLIP's embedding says what a picture shows, patches say where. Those in the prompt's region do
not count. A copy of the source scores 1, so it belongs beside a reward of what should have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torchvision.transforms.v2 import functional as pixels

from digenrl.rewards.protocol import (
    as_rgb,
    require_images,
    resolve_device,
    sample_frames,
    source_images,
)
from digenrl.types import Prompt
from reward_models.region import outside
from reward_models.weights import checkpoint, module_digest

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
"""ImageNet's, with which DINOv2 was trained (facebook/dinov2-base, preprocessor_config.json)."""
CHUNK = 32
"""Pictures per forward."""


class DinoSimilarity:
    """Mean cosine of the patches of a sample and of its `image`, outside of the prompt's `region`.

    Args:
        path: a DINOv2 checkpoint with safetensors, directory or hub id; the tiny build needs none.
        build: "real" or "tiny" (a small random DINOv2 through the same code).
        patches: of a side; both pictures are stretched to a square of so many.
        frames: frames sampled from a video.
        device: "auto", or as torch reads it.
        dtype: of the model.
    """

    reads_images = True

    def __init__(
        self,
        path: str | None = None,
        build: str = "real",
        patches: int = 16,
        frames: int = 4,
        device: str = "auto",
        dtype: str = "float32",
    ) -> None:
        from transformers import Dinov2Model

        self._device, self._dtype = resolve_device(device), getattr(torch, dtype)
        with checkpoint(path, build, _make_dino) as source:
            model = Dinov2Model.from_pretrained(
                source, use_safetensors=True, dtype=self._dtype, local_files_only=True
            )
        self._model = model.to(self._device).eval().requires_grad_(False)
        self._patches, self._frames = patches, frames
        name = f"{path}" if build == "real" else "tiny"
        self.model_id = f"dino_similarity({name}, patches={patches}, frames={frames})"
        self.weights_digest = module_digest(self._model)

    @staticmethod
    def check_prompts(prompts: Sequence[Prompt]) -> None:
        """Raise ValueError for a prompt without `image`, or with a `region` that is none or
        everything."""
        require_images(prompts, "image")
        for prompt in prompts:
            outside(prompt, 16, 16)

    @torch.no_grad()
    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return [B] in [-1, 1]; a video gives the mean of its sampled frames."""
        sampled = sample_frames(media, self._frames)
        own = self._features(sampled.flatten(0, 1)).unflatten(0, sampled.shape[:2])
        sources = self._features(source_images(media, prompts))[:, None]
        places = [outside(prompt, self._patches, self._patches).flatten() for prompt in prompts]
        counted = torch.stack(places).to(own)[:, None]
        return ((own * sources).sum(-1) * counted).sum(-1).div(counted.sum(-1)).mean(1)

    def _features(self, pictures: Tensor) -> Tensor:
        """Return unit patch features [N, patches^2, D] fp32, row by row."""
        side = self._patches * self._model.config.patch_size
        found = []
        for chunk in pictures.split(CHUNK):
            rgb = as_rgb(chunk).to(self._device).float()
            square = pixels.resize(
                rgb, [side, side], pixels.InterpolationMode.BICUBIC, antialias=True
            ).clamp(0, 1)
            seen = self._model(
                pixel_values=pixels.normalize(square, MEAN, STD).to(self._dtype)
            ).last_hidden_state
            found.append(
                functional.normalize(seen[:, 1:].float(), dim=-1)
            )  # the first one stands for the picture
        return torch.cat(found)


def _make_dino(directory: Path) -> None:
    """Write a DINOv2 of two layers, laid out as the hub's checkpoints are."""
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
        mlp_ratio=2,
    )
    Dinov2Model(config).save_pretrained(directory, safe_serialization=True)
