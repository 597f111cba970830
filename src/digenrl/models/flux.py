"""FLUX.1 (black-forest-labs/flux): T5 and pooled CLIP, embedded guidance, latents packed into
tokens [N, 64]."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock
from torch import Tensor

from digenrl.models.latents import pack_latents, token_positions, unpack_latents
from digenrl.models.lora import Names
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.models.pipeline_codec import DiffusersCodec
from digenrl.models.scales import rescale_latents, unscale_latents

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin

ATTENTION = tuple(
    f"attn.{name}"
    for name in (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
    )
)
SINGLE_ATTENTION = ("attn.to_q", "attn.to_k", "attn.to_v")
FEED_FORWARD = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")

_QKV, _ADDED = ATTENTION[:3], ATTENTION[4:7]
CHECKPOINT_NAMES: Names = {
    r"transformer_blocks\.(\d+)\.": {
        _QKV: "double_blocks.{}.img_attn.qkv",
        _ADDED: "double_blocks.{}.txt_attn.qkv",
        ("attn.to_out.0",): "double_blocks.{}.img_attn.proj",
        ("attn.to_add_out",): "double_blocks.{}.txt_attn.proj",
        ("ff.net.0.proj",): "double_blocks.{}.img_mlp.0",
        ("ff.net.2",): "double_blocks.{}.img_mlp.2",
        ("ff_context.net.0.proj",): "double_blocks.{}.txt_mlp.0",
        ("ff_context.net.2",): "double_blocks.{}.txt_mlp.2",
    },
    r"single_transformer_blocks\.(\d+)\.": {
        (*_QKV, "proj_mlp"): "single_blocks.{}.linear1",
        ("proj_out",): "single_blocks.{}.linear2",
    },
}


class LastBlock(FluxSingleTransformerBlock):
    """Last block of the network, whose text nobody reads: it computes that of the image alone."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        joint_attention_kwargs: dict[str, object] | None = None,
    ) -> tuple[Tensor, Tensor]:
        text = encoder_hidden_states.shape[1]
        # both [B, text and image tokens, d], gate [B, d]
        both, gate = self.norm(torch.cat([encoder_hidden_states, hidden_states], 1), emb=temb)
        named = joint_attention_kwargs or {}
        # The image still attends to the text, so attention gets both and its text rows are dropped.
        asked = self.attn(hidden_states=both, image_rotary_emb=image_rotary_emb, **named)[:, text:]
        inner = self.act_mlp(self.proj_mlp(both[:, text:]))
        out = gate.unsqueeze(1) * self.proj_out(torch.cat([asked, inner], 2))
        return encoder_hidden_states, hidden_states + out


class FluxCodec(DiffusersCodec):
    """T5 and CLIP texts, images as packed tokens."""

    vae_class = AutoencoderKL
    packed = True

    def encode_text(self, pipeline: DiffusionPipeline, text: str) -> dict[str, Tensor]:
        """Return T5 states [1, max_sequence_length, d] and the pooled CLIP vector [1, d]."""
        self.report_long_prompt(pipeline.tokenizer_2, text, self.max_sequence_length)
        self.report_long_prompt(pipeline.tokenizer, text, pipeline.tokenizer_max_length)
        embeddings, pooled, _ = pipeline.encode_prompt(
            text,
            # None: T5 reads the same text as CLIP.
            prompt_2=None,
            device=pipeline.device,
            max_sequence_length=self.max_sequence_length,
        )
        return {"text": embeddings, "pooled": pooled}

    def decode_latents(self, vae: AutoencoderKL, latents: Tensor) -> Tensor:
        images = unscale_latents(unpack_latents(latents, *self.image_grid()), vae.config)
        return vae.decode(images, return_dict=False)[0]

    def encode_latents(self, vae: AutoencoderKL, pixels: Tensor) -> Tensor:
        return pack_latents(rescale_latents(vae.encode(pixels).latent_dist.mode(), vae.config))


class FluxPolicy(DiffusersPolicy):
    """FLUX.1-dev; arguments in `DiffusersPolicy`."""

    family = "flux"
    pipelines = ("FluxPipeline",)
    transformer_class = FluxTransformer2DModel
    codec_class = FluxCodec
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    embedded_guidance = True
    attention = ATTENTION
    feed_forward = FEED_FORWARD
    single_attention = SINGLE_ATTENTION
    checkpoint_names = CHECKPOINT_NAMES

    @classmethod
    def joined(cls, networks: list[ModelMixin], path: str | None = None) -> ModelMixin:
        (network,) = networks
        # Another class for the same weights, so that checkpoints keep their names.
        network.single_transformer_blocks[-1].__class__ = LastBlock
        return network

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        guidance = None
        if self.transformer.config.guidance_embeds:  # type: ignore[union-attr]
            guidance = torch.full_like(sigmas, self.guidance_scale)
        text = condition["text"]
        return self.network(
            hidden_states=latents,
            timestep=sigmas,  # the network multiplies by 1000
            guidance=guidance,
            pooled_projections=condition["pooled"],
            encoder_hidden_states=text,
            # [text tokens, 3]: text has no place in the picture.
            txt_ids=torch.zeros(text.shape[1], 3, device=text.device, dtype=text.dtype),
            img_ids=self.position_ids(text.device).to(text.dtype),
            return_dict=False,
        )[0]

    def position_ids(self, device: torch.device) -> Tensor:
        """Return the positions of all tokens that `predict` is given, [tokens, 3]."""
        # 16 pixels: 8 of the autoencoder times 2 of a patch.
        return token_positions(self.codec.height // 16, self.codec.width // 16, device)
