"""AuraFlow (fal/AuraFlow): UMT5 text without a mask, classifier-free guidance, latents [4, h,
w]."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from diffusers import AuraFlowTransformer2DModel, AutoencoderKL
from torch import Tensor

from digenrl.extensions.zoo.flux import ATTENTION
from digenrl.models.pipeline import DiffusersPolicy

FEED_FORWARD = ("linear_1", "linear_2", "out_projection")


class AuraFlowPolicy(DiffusersPolicy):
    """Policy of AuraFlow; arguments in `DiffusersPolicy`.

    The network reads the padding of the text (zeros), so velocities depend on
    `max_sequence_length`, 256 in its pipeline. Its learned positions form a square that is cut
    around the middle. A larger image would read the positions of others.
    """

    family = "aura_flow"
    pipelines = ("AuraFlowPipeline",)
    transformer_class = AuraFlowTransformer2DModel
    vae_class = AutoencoderKL
    channels = 4
    block_lists = ("joint_transformer_blocks", "single_transformer_blocks")
    depths = ("num_mmdit_layers", "num_single_dit_layers")
    attention = ATTENTION
    feed_forward = tuple(
        f"{part}.{layer}" for part in ("ff", "ff_context") for layer in FEED_FORWARD
    )
    single_attention = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
    single_feed_forward = tuple(f"ff.{layer}" for layer in FEED_FORWARD)

    @classmethod
    def check(cls, settings: Mapping[str, Any]) -> None:
        """Refuse also a size beyond the network's positions. Raises ValueError."""
        super().check(settings)
        side = math.isqrt(cls.network_config(settings)["pos_embed_max_size"]) * cls.spatial_stride
        for name in ("height", "width"):
            if settings[name] > side:
                raise ValueError(
                    f"sampling.{name}={settings[name]}: {cls.family} has positions for {side} "
                    "pixels at most"
                )

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        return self.network(
            hidden_states=latents,
            encoder_hidden_states=condition["text"],
            timestep=sigmas,  # the network multiplies by 1000
            return_dict=False,
        )[0]

    def encode_text(self, pipeline: Any, text: str) -> dict[str, Tensor]:
        """Return UMT5 states [1, max_sequence_length, d], zero after the text."""
        self.report_long_prompt(pipeline.tokenizer, text, self.max_sequence_length)
        embeddings, *_ = pipeline.encode_prompt(
            text,
            device=pipeline.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"text": embeddings}

    def decode_latents(self, vae: Any, latents: Tensor) -> Tensor:
        return vae.decode(latents / vae.config.scaling_factor, return_dict=False)[0]
