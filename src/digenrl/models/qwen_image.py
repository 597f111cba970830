"""Qwen-Image (arXiv:2508.02324): Qwen2.5-VL text, norm-preserving guidance, latents packed into tokens [N, 64]."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from torch import Tensor
from torch.nn.functional import pad

from digenrl.models.flux import ATTENTION
from digenrl.models.latents import CHANNELS, denormalise, unpack
from digenrl.models.pipeline import DiffusersPolicy

TEMPLATE_TOKENS = 34
"""Tokens of the chat template before the prompt, which the pipeline drops from the hidden states."""
FEED_FORWARD = ("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")


class QwenImagePolicy(DiffusersPolicy):
    """Qwen-Image; arguments in `DiffusersPolicy`."""

    family = "qwen_image"
    pipelines = ("QwenImagePipeline",)
    transformer_class = QwenImageTransformer2DModel
    vae_class = AutoencoderKLQwenImage
    unread = frozenset(
        {"attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2"}
    )

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        output: Tensor = self.network(
            hidden_states=latents,
            timestep=sigmas,  # the network multiplies by 1000
            encoder_hidden_states=condition["text"],
            encoder_hidden_states_mask=condition["mask"],
            img_shapes=[[(1, self.height // 16, self.width // 16)]] * latents.shape[0],
            return_dict=False,
        )[0]
        return output

    def guide(self, conditional: Tensor, unconditional: Tensor) -> Tensor:
        """Guidance rescaled, token by token, to the conditional velocity's norm (diffusers QwenImagePipeline)."""
        combined = super().guide(conditional, unconditional)
        norm = torch.linalg.vector_norm(conditional, dim=-1, keepdim=True)
        return combined * (norm / torch.linalg.vector_norm(combined, dim=-1, keepdim=True))

    def encode_text(self, pipeline: Any, text: str) -> dict[str, Tensor]:
        """Qwen2.5-VL states [1, max_sequence_length, d], zero-padded, and the mask [1, max_sequence_length]."""
        self.report_long_prompt(pipeline.tokenizer, text, self.max_sequence_length)
        embeddings, mask = pipeline.encode_prompt(
            text, device=self.device, max_sequence_length=self.max_sequence_length
        )
        if mask is None:  # the pipeline's way of saying that every position counts
            mask = embeddings.new_ones(embeddings.shape[:2])
        padding = self.max_sequence_length - embeddings.shape[1]
        return {"text": pad(embeddings, (0, 0, 0, padding)), "mask": pad(mask.bool(), (0, padding))}

    def decode_latents(self, vae: Any, latents: Tensor) -> Tensor:
        images = denormalise(unpack(latents, *self.image_grid()).unsqueeze(2), vae.config)
        decoded: Tensor = vae.decode(images, return_dict=False)[0][:, :, 0]
        return decoded

    def check_encoders(self, pipeline: Any) -> None:
        """The template before the prompt must be exactly the 34 tokens that the pipeline drops."""
        prefix = pipeline.prompt_template_encode.split("{}")[0]
        tokens = len(pipeline.tokenizer(prefix).input_ids)
        if tokens != TEMPLATE_TOKENS:
            raise ValueError(
                f"the tokenizer of {self.path} makes {tokens} tokens of Qwen-Image's template, the pipeline drops "
                f"{TEMPLATE_TOKENS}: parts of the prompt would be lost; use the tokenizer that ships with the model"
            )

    @classmethod
    def lora_names(cls, config: Any, preset: str) -> list[str]:
        """8 attention layers a block (and 4 of the two feed-forward networks), less the last block's text output."""
        layers = [f"attn.{name}" for name in ATTENTION] + (list(FEED_FORWARD) if preset == "attention_ff" else [])
        last = config.num_layers - 1
        return [
            f"transformer_blocks.{block}.{layer}"
            for block in range(config.num_layers)
            for layer in layers
            if block < last or layer not in cls.unread
        ]

    @classmethod
    def _latent_shape(cls, height: int, width: int, frames: int) -> tuple[int, ...]:
        return ((height // 16) * (width // 16), CHANNELS * 4)
