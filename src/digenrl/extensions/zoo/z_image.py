"""Z-Image (arXiv:2511.22699): Qwen3 text, one stream of image and text tokens, latents [16, h,
w]."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from diffusers import AutoencoderKL, ZImageTransformer2DModel
from torch import Tensor
from torch.nn.functional import pad

from digenrl.models.lora import Names
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.models.pipeline_codec import DiffusersCodec
from digenrl.models.scales import unscale_latents
from digenrl.models.shared import report_long_turn

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class ZImageCodec(DiffusersCodec):
    """Qwen3 texts, images."""

    vae_class = AutoencoderKL

    def encode_text(self, pipeline: DiffusionPipeline, text: str) -> dict[str, Tensor]:
        """Return Qwen3 states [1, max_sequence_length, d], zero-padded, and the mask [1,
        max_sequence_length]."""
        report_long_turn(self, pipeline.tokenizer, text, enable_thinking=True)
        (states,), _ = pipeline.encode_prompt(
            text,
            device=pipeline.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        padding = self.max_sequence_length - len(states)
        mask = torch.ones(len(states), dtype=torch.bool, device=states.device)
        return {
            "text": pad(states, (0, 0, 0, padding)).unsqueeze(0),
            "mask": pad(mask, (0, padding)).unsqueeze(0),
        }

    def decode_latents(self, vae: AutoencoderKL, latents: Tensor) -> Tensor:
        return vae.decode(unscale_latents(latents, vae.config), return_dict=False)[0]


CHECKPOINT_NAMES: Names = {
    rf"{blocks}\.(\d+)\.": {
        ("attention.to_q", "attention.to_k", "attention.to_v"): f"{blocks}.{{}}.attention.qkv",
        ("attention.to_out.0",): f"{blocks}.{{}}.attention.out",
        **{
            (f"feed_forward.{part}",): f"{blocks}.{{}}.feed_forward.{part}"
            for part in ("w1", "w2", "w3")
        },
    }
    for blocks in ("layers", "noise_refiner", "context_refiner")
}
"""Names in the files that ComfyUI reads, where queries, keys and values are one layer."""


class ZImagePolicy(DiffusersPolicy):
    """Policy of Z-Image, the model before its distillation to few steps; arguments in
    `DiffusersPolicy`.

    diffusers' ZImagePipeline counts guidance from the conditional velocity, so its scale is one
    less than here. LoRA leaves the refiners of image and text tokens frozen.
    """

    family = "z_image"
    codec_class = ZImageCodec
    pipelines = ("ZImagePipeline",)
    transformer_class = ZImageTransformer2DModel
    checkpoint_names = CHECKPOINT_NAMES
    block_lists = ("layers", "noise_refiner", "context_refiner")
    depths = ("n_layers",)
    attention = ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0")
    feed_forward = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        texts, mask = condition["text"], condition.get("mask")
        rows = (
            list(texts)
            if mask is None
            else [text[kept] for text, kept in zip(texts, mask, strict=True)]
        )
        # The network's clock runs from noise at 0 to the image at 1, and so does its velocity.
        velocities = self.network(
            list(latents.unsqueeze(2)), 1.0 - sigmas, rows, return_dict=False
        )[0]
        return -torch.stack(velocities).squeeze(2)
