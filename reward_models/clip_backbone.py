"""CLIP image and text embeddings, shared by the scorers that sit on a CLIP (`clip_score`,
`pickscore`, `hpsv2`, `aesthetic`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from torchvision.transforms.v2 import functional as pixels

from digenrl.rewards.protocol import as_rgb, resolve_device, sample_frames
from digenrl.types import Prompt
from reward_models.weights import checkpoint, make_clip, module_digest

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""Pixel statistics of OpenAI's CLIP, which the LAION models kept (openai/CLIP `clip/clip.py`)."""
CHUNK = 32
"""Pictures per forward: bounds the scorer's memory whatever the task's size."""


class ClipBackbone:
    """A frozen `transformers.CLIPModel` and its tokenizer.

    Args:
        path: local directory or hub id with safetensors; ignored by the tiny build.
        build: "real" or "tiny" (a small random CLIP through the same code).
        device: "auto", or as torch reads it.
        dtype: of the weights and activations; embeddings come back in fp32.
    """

    def __init__(
        self, path: str | None, build: str, device: str = "auto", dtype: str = "float32"
    ) -> None:
        from transformers import CLIPModel, CLIPTokenizer

        self.device, self.dtype = resolve_device(device), getattr(torch, dtype)
        with checkpoint(path, build, make_clip) as source:
            model = CLIPModel.from_pretrained(
                source, use_safetensors=True, dtype=self.dtype, local_files_only=True
            )
            self.tokenizer = CLIPTokenizer.from_pretrained(source, local_files_only=True)
        self.model = model.to(self.device).eval().requires_grad_(False)
        self.name = f"{path or 'clip'}" if build == "real" else "tiny"
        self.digest = module_digest(self.model)

    @property
    def image_size(self) -> int:
        """Side of the square picture that the model reads."""
        return self.model.config.vision_config.image_size

    @property
    def width(self) -> int:
        """Size D of an embedding."""
        return self.model.config.projection_dim

    @property
    def logit_scale(self) -> float:
        """The model's learned temperature, exponentiated."""
        return self.model.logit_scale.exp().item()

    @torch.no_grad()
    def images(self, pictures: Tensor) -> Tensor:
        """Return unit embeddings [N, D] fp32 of `pictures` [N, C, H, W] in [0, 1]."""
        chunks = [self._embed_images(chunk) for chunk in pictures.split(CHUNK)]
        return torch.cat(chunks)

    @torch.no_grad()
    def frames(self, media: Tensor, frames: int) -> Tensor:
        """Return unit embeddings [B, F, D] fp32 of up to `frames` frames of each sample; F = 1 for
        images."""
        sampled = sample_frames(media, frames)
        return self.images(sampled.flatten(0, 1)).unflatten(0, sampled.shape[:2])

    @torch.no_grad()
    def texts(self, texts: Sequence[str]) -> Tensor:
        """Return unit embeddings [N, D] fp32; texts longer than the model's context are cut, as its
        authors do."""
        tokens = self.tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=self.model.config.text_config.max_position_embeddings,
            return_tensors="pt",
        ).to(self.device)
        features = self.model.get_text_features(
            input_ids=tokens.input_ids, attention_mask=tokens.attention_mask
        )
        return unit_rows(features)

    def _embed_images(self, pictures: Tensor) -> Tensor:
        inputs = clip_pixels(pictures.to(self.device), self.image_size).to(self.dtype)
        return unit_rows(self.model.get_image_features(pixel_values=inputs))


class CosineScorer:
    """The cosine of picture and prompt under a CLIP.

    Args:
        path: a CLIP checkpoint with its tokenizer, directory or hub id; the tiny build needs none.
        build: "real" or "tiny".
        frames: frames sampled from a video.
        device: "auto", or as torch reads it.
        dtype: of the model.
    """

    name: ClassVar[str]
    backbone: ClassVar[Callable[..., ClipBackbone]] = ClipBackbone

    def __init__(
        self,
        path: str | None = None,
        build: str = "real",
        frames: int = 4,
        device: str = "auto",
        dtype: str = "float32",
    ) -> None:
        self.clip, self._frames = type(self).backbone(path, build, device, dtype), frames
        self.model_id = f"{self.name}({self.clip.name}, frames={frames})"
        self.weights_digest = self.clip.digest

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return [B] in [-1, 1]; a video gives the mean of its sampled frames."""
        texts = self.clip.texts([prompt.text for prompt in prompts])
        return (self.clip.frames(media, self._frames) * texts[:, None]).sum(-1).mean(1)


def clip_pixels(pictures: Tensor, size: int) -> Tensor:
    """Return [N, 3, size, size] fp32 normalised pixels: shortest side to `size` (bicubic,
    antialiased), centre crop.

    The steps of `transformers.CLIPImageProcessor`, on the tensor's own device.
    """
    rgb = as_rgb(pictures).float()
    resized = pixels.resize(rgb, [size], pixels.InterpolationMode.BICUBIC, antialias=True).clamp(
        0, 1
    )
    top, left = (
        (side - size) // 2 for side in resized.shape[-2:]
    )  # torchvision's centre crop rounds up
    return pixels.normalize(
        pixels.crop(resized, top, left, size, size), list(CLIP_MEAN), list(CLIP_STD)
    )


def unit_rows(features: object) -> Tensor:
    """Return unit rows in fp32; transformers returns the projected embedding bare or as
    `pooler_output`, by version."""
    embedding = features if isinstance(features, Tensor) else features.pooler_output  # type: ignore[attr-defined]
    return functional.normalize(embedding.float(), dim=-1)
