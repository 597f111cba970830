"""Qwen-Image (arXiv:2508.02324): Qwen2.5-VL text, norm-preserving guidance, latents packed into tokens [N, 64]."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from torch import Tensor
from torch.nn.functional import pad

from digenrl.models.flux import ATTENTION
from digenrl.models.latents import denormalise, unpack
from digenrl.models.pipeline import DiffusersPolicy

TEMPLATE_TOKENS = 34
"""Tokens of the chat template before the prompt, which the pipeline drops from the hidden states."""


class QwenImagePolicy(DiffusersPolicy):
    """Qwen-Image; arguments in `DiffusersPolicy`."""

    family = "qwen_image"
    pipelines = ("QwenImagePipeline",)
    transformer_class = QwenImageTransformer2DModel
    vae_class = AutoencoderKLQwenImage
    packed = True
    attention = ATTENTION
    feed_forward = ("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")
    unread = frozenset(
        {"attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2"}
    )

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        return self.network(
            hidden_states=latents,
            timestep=sigmas,  # the network multiplies by 1000
            encoder_hidden_states=condition["text"],
            encoder_hidden_states_mask=condition.get("mask"),
            img_shapes=[[(1, self.height // 16, self.width // 16)]] * latents.shape[0],
            return_dict=False,
        )[0]

    def guide(self, conditional: Tensor, unconditional: Tensor) -> Tensor:
        """Guidance rescaled, token by token, to the conditional velocity's norm (diffusers QwenImagePipeline)."""
        combined = super().guide(conditional, unconditional)
        norm = torch.linalg.vector_norm(conditional, dim=-1, keepdim=True)
        return combined * (norm / torch.linalg.vector_norm(combined, dim=-1, keepdim=True))

    def encode_text(self, pipeline: Any, text: str) -> dict[str, Tensor]:
        """Qwen2.5-VL states [1, max_sequence_length, d], zero-padded, and the mask [1, max_sequence_length]."""
        self.report_long_prompt(pipeline.tokenizer, text, self.max_sequence_length)
        embeddings, mask = pipeline.encode_prompt(
            text, device=pipeline.device, max_sequence_length=self.max_sequence_length
        )
        if mask is None:  # the pipeline's way of saying that every position counts
            mask = embeddings.new_ones(embeddings.shape[:2])
        padding = self.max_sequence_length - embeddings.shape[1]
        return {"text": pad(embeddings, (0, 0, 0, padding)), "mask": pad(mask.bool(), (0, padding))}

    def decode_latents(self, vae: Any, latents: Tensor) -> Tensor:
        images = denormalise(unpack(latents, *self.image_grid()).unsqueeze(2), vae.config)
        return vae.decode(images, return_dict=False)[0][:, :, 0]

    def check_encoders(self, pipeline: Any) -> None:
        """The template before the prompt must be exactly the 34 tokens that the pipeline drops."""
        self.require_template(pipeline.tokenizer, pipeline.prompt_template_encode, TEMPLATE_TOKENS)
