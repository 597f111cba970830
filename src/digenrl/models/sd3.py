"""Stable Diffusion 3.5 (arXiv:2403.03206): two CLIPs and T5, classifier-free guidance, latents [16,
h, w]."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffusers import AutoencoderKL, SD3Transformer2DModel
from torch import Tensor

from digenrl.models.flux import ATTENTION, FEED_FORWARD
from digenrl.models.lora import Names
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.models.pipeline_codec import DiffusersCodec
from digenrl.models.scales import rescale_latents, unscale_latents

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin

CHECKPOINT_NAMES: Names = {
    r"transformer_blocks\.(\d+)\.": {
        ATTENTION[:3]: "joint_blocks.{}.x_block.attn.qkv",
        ATTENTION[4:7]: "joint_blocks.{}.context_block.attn.qkv",
        ("attn2.to_q", "attn2.to_k", "attn2.to_v"): "joint_blocks.{}.x_block.attn2.qkv",
        ("attn.to_out.0",): "joint_blocks.{}.x_block.attn.proj",
        ("attn.to_add_out",): "joint_blocks.{}.context_block.attn.proj",
        ("attn2.to_out.0",): "joint_blocks.{}.x_block.attn2.proj",
        ("ff.net.0.proj",): "joint_blocks.{}.x_block.mlp.fc1",
        ("ff.net.2",): "joint_blocks.{}.x_block.mlp.fc2",
        ("ff_context.net.0.proj",): "joint_blocks.{}.context_block.mlp.fc1",
        ("ff_context.net.2",): "joint_blocks.{}.context_block.mlp.fc2",
    }
}
"""Layer names of SD3's own checkpoints, for LoRA files of kohya's tools and ComfyUI."""


class SD3Codec(DiffusersCodec):
    """Text encoders (two CLIPs, T5) and the image VAE."""

    vae_class = AutoencoderKL

    def encode_text(self, pipeline: DiffusionPipeline, text: str) -> dict[str, Tensor]:
        """Return CLIP and T5 states [1, 77 + max_sequence_length, d] and the pooled CLIP vectors
        [1, d]."""
        self.report_long_prompt(pipeline.tokenizer, text, pipeline.tokenizer_max_length)
        self.report_long_prompt(pipeline.tokenizer_3, text, self.max_sequence_length)
        embeddings, _, pooled, _ = pipeline.encode_prompt(
            text,
            prompt_2=None,
            prompt_3=None,
            device=pipeline.device,
            # A negative prompt is encoded by its own call of this method.
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"text": embeddings, "pooled": pooled}

    def decode_latents(self, vae: AutoencoderKL, latents: Tensor) -> Tensor:
        return vae.decode(unscale_latents(latents, vae.config), return_dict=False)[0]

    def encode_latents(self, vae: AutoencoderKL, pixels: Tensor) -> Tensor:
        return rescale_latents(vae.encode(pixels).latent_dist.mode(), vae.config)


class SD3Policy(DiffusersPolicy):
    """SD3.5 medium and large; arguments in `DiffusersPolicy`.

    LoRA leaves the second attention of the dual blocks (attn2) frozen, as in Flow-GRPO's target
    list.
    """

    family = "sd3"
    pipelines = ("StableDiffusion3Pipeline",)
    transformer_class = SD3Transformer2DModel
    codec_class = SD3Codec
    attention = ATTENTION
    feed_forward = FEED_FORWARD
    checkpoint_names = CHECKPOINT_NAMES
    unread = frozenset(
        {
            "attn.add_q_proj",
            "attn.norm_added_q",
            "attn.to_add_out",
            "ff_context.net.0.proj",
            "ff_context.net.2",
        }
    )

    @classmethod
    def joined(cls, networks: list[ModelMixin], path: str | None = None) -> ModelMixin:
        (network,) = networks
        # The text output of the last block is not used, so its attention needs no text queries.
        # Keys and values of the text stay.
        asking = network.transformer_blocks[-1].attn.add_q_proj
        asking.register_forward_pre_hook(lambda _, inputs: (inputs[0][:, :0],))
        return network

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        return self.network(
            hidden_states=latents,
            timestep=sigmas * 1000,  # the network counts from 0 to 1000
            encoder_hidden_states=condition["text"],
            pooled_projections=condition["pooled"],
            return_dict=False,
        )[0]
