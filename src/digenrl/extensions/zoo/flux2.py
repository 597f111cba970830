"""FLUX.2 klein (black-forest-labs/flux2): states of three Qwen3 layers as text, latents packed into
tokens [N, 128]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from torch import Tensor
from torch.nn.functional import pad

from digenrl.models.flux import ATTENTION
from digenrl.models.latents import token_positions, unpack_latents
from digenrl.models.lora import Names
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.models.pipeline_codec import DiffusersCodec
from digenrl.models.shared import report_long_turn

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class Flux2KleinCodec(DiffusersCodec):
    """Qwen3 texts, images as packed tokens."""

    vae_class = AutoencoderKLFlux2
    packed = True
    channels = 32

    def encode_text(self, pipeline: DiffusionPipeline, text: str) -> dict[str, Tensor]:
        """Return Qwen3 states of three layers side by side [1, max_sequence_length, 3 d]."""
        report_long_turn(self, pipeline.tokenizer, text, enable_thinking=False)
        states, _ = pipeline.encode_prompt(
            text, device=pipeline.device, max_sequence_length=self.max_sequence_length
        )
        return {"text": states}

    def decode_latents(self, vae: AutoencoderKLFlux2, latents: Tensor) -> Tensor:
        """Decode tokens, which were normalised channel by channel with the running statistics of
        the autoencoder."""
        std = torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
        tokens = latents * std.to(latents) + vae.bn.running_mean.to(latents)
        return vae.decode(unpack_latents(tokens, *self.image_grid()), return_dict=False)[0]


CHECKPOINT_NAMES: Names = {
    r"transformer_blocks\.(\d+)\.": {
        ATTENTION[:3]: "double_blocks.{}.img_attn.qkv",
        ATTENTION[4:7]: "double_blocks.{}.txt_attn.qkv",
        ("attn.to_out.0",): "double_blocks.{}.img_attn.proj",
        ("attn.to_add_out",): "double_blocks.{}.txt_attn.proj",
        ("ff.linear_in",): "double_blocks.{}.img_mlp.0",
        ("ff.linear_out",): "double_blocks.{}.img_mlp.2",
        ("ff_context.linear_in",): "double_blocks.{}.txt_mlp.0",
        ("ff_context.linear_out",): "double_blocks.{}.txt_mlp.2",
    },
    r"single_transformer_blocks\.(\d+)\.": {
        ("attn.to_qkv_mlp_proj",): "single_blocks.{}.linear1",
        ("attn.to_out",): "single_blocks.{}.linear2",
    },
}


class Flux2KleinPolicy(DiffusersPolicy):
    """Policy of FLUX.2 klein base, before its distillation to four steps; arguments in
    `DiffusersPolicy`.

    The network reads the padding of prompts like text, without a mask, as it was trained.
    """

    family = "flux2_klein"
    codec_class = Flux2KleinCodec
    pipelines = ("Flux2KleinPipeline",)
    transformer_class = Flux2Transformer2DModel
    checkpoint_names = CHECKPOINT_NAMES
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    attention = ATTENTION
    feed_forward = (
        "ff.linear_in",
        "ff.linear_out",
        "ff_context.linear_in",
        "ff_context.linear_out",
    )
    single_attention = (
        "attn.to_qkv_mlp_proj",
        "attn.to_out",
    )  # one product for attention and feed-forward

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        text = condition["text"]
        words = torch.arange(text.shape[1], device=text.device).unsqueeze(1)
        return self.network(
            hidden_states=latents,
            timestep=sigmas,  # the network multiplies by 1000
            guidance=None,
            encoder_hidden_states=text,
            txt_ids=pad(words, (3, 0)),  # (0, 0, 0, word), and of tokens (0, row, column, 0)
            img_ids=pad(self.position_ids(text.device), (0, 1)),
            return_dict=False,
        )[0]

    def position_ids(self, device: torch.device) -> Tensor:
        """Return the positions of the image's tokens, [tokens, 3]."""
        return token_positions(self.codec.height // 16, self.codec.width // 16, device)

    def _dynamic_shift(self, config: Mapping[str, float], steps: int) -> float:
        """Return the shift mu by tokens and steps (black-forest-labs/flux2)."""
        return float(compute_empirical_mu(self.latent_shape[0], steps))
