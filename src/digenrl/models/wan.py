"""Wan2.1 (arXiv:2503.20314): UMT5 text, classifier-free guidance, latents [16, f, h, w]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor

from digenrl.models import pretrained
from digenrl.models.exchange import attend_together
from digenrl.models.lora import Names
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.models.pipeline_codec import DiffusersCodec
from digenrl.models.scales import denormalise_latents, normalise_latents
from digenrl.models.shared import attend_with

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from diffusers.models.transformers.transformer_wan import WanAttention

CHECKPOINT_NAMES: Names = {
    r"blocks\.(\d+)\.": {
        **{
            (f"attn{number}.{ours}",): f"blocks.{{}}.{part}.{theirs}"
            for number, part in ((1, "self_attn"), (2, "cross_attn"))
            for ours, theirs in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o"))
        },
        ("attn2.add_k_proj",): "blocks.{}.cross_attn.k_img",
        ("attn2.add_v_proj",): "blocks.{}.cross_attn.v_img",
        ("ffn.net.0.proj",): "blocks.{}.ffn.0",
        ("ffn.net.2",): "blocks.{}.ffn.2",
    }
}


class _SelfAttention(WanAttnProcessor):
    """Self-attention of the video's tokens that a context group can compute together."""

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        # Set only while a context group computes a forward together (parallel.context).
        if self._parallel_config is None:
            return super().__call__(
                attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb
            )
        assert rotary_emb is not None  # only cross-attention has none
        states = (
            attn.norm_q(attn.to_q(hidden_states)),
            attn.norm_k(attn.to_k(hidden_states)),
            attn.to_v(hidden_states),
        )
        # [B, tokens of the rank, heads, d] each.
        query, key, value = (part.unflatten(2, (attn.heads, -1)) for part in states)
        rotated = [_apply_rotary(part, *rotary_emb) for part in (query, key)]
        (seen,) = attend_together(
            self._parallel_config, (*rotated, value), backend=self._attention_backend
        )
        return attn.to_out[1](attn.to_out[0](seen))


def _apply_rotary(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Apply the rotary embedding to [B, tokens, heads, d] by angles [1, tokens, 1, d], in which
    each angle appears twice."""
    real, imaginary = states.unflatten(-1, (-1, 2)).unbind(-1)  # [B, tokens, heads, d / 2]
    cosine, sine = cosines[..., ::2], sines[..., ::2]
    turned = real * cosine - imaginary * sine, real * sine + imaginary * cosine
    return torch.stack(turned, dim=-1).flatten(-2).type_as(states)


class WanCodec(DiffusersCodec):
    """UMT5 texts, videos."""

    vae_class = AutoencoderKLWan
    temporal_stride = 4

    def encode_text(self, pipeline: DiffusionPipeline, text: str) -> dict[str, Tensor]:
        """Return UMT5 states [1, max_sequence_length, d], zero after the prompt. Wan attends to the
        zeros, so there is no mask."""
        self.report_long_prompt(pipeline.tokenizer, text, self.max_sequence_length)
        embeddings, _ = pipeline.encode_prompt(
            text,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
            device=pipeline.device,
        )
        return {"text": embeddings}

    def decode_latents(self, vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
        return vae.decode(denormalise_latents(latents, vae.config), return_dict=False)[0]

    def encode_latents(self, vae: AutoencoderKLWan, pixels: Tensor) -> Tensor:
        # A picture is a video of one frame: [B, 3, 1, H, W].
        return normalise_latents(vae.encode(pixels.unsqueeze(2)).latent_dist.mode(), vae.config)


class WanPolicy(DiffusersPolicy):
    """Wan2.1 text-to-video, 1.3B and 14B; arguments in `DiffusersPolicy`."""

    family = "wan"
    pipelines = ("WanPipeline",)
    transformer_class = WanTransformer3DModel
    codec_class = WanCodec
    block_lists = ("blocks",)
    attention = tuple(
        f"attn{i}.{name}" for i in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0")
    )
    feed_forward = ("ffn.net.0.proj", "ffn.net.2")
    checkpoint_names = CHECKPOINT_NAMES
    # Tokens are split in front of the first block and gathered behind the last projection.
    context_plan: ClassVar[dict[str, Any]] = {
        "rope": {
            part: ContextParallelInput(split_dim=1, expected_dims=4, split_output=True)
            for part in (0, 1)
        },
        "blocks.0": {"hidden_states": ContextParallelInput(split_dim=1, expected_dims=3)},
        "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    }

    def add_family_parts(self) -> None:
        for block in self.wrap_units():
            attend_with(block.attn1, _SelfAttention())

    @classmethod
    def check_checkpoint(cls, path: str) -> None:
        """Check the checkpoint as every family does, and also its experts and its timesteps.

        A checkpoint is refused if an expert would be left out or is missing, or if its timesteps
        differ by token (Wan2.2 5B).
        """
        super().check_checkpoint(path)
        index = pretrained.model_index(path)
        experts = index.get("boundary_ratio") is not None
        if experts != ("transformer_2" in cls.components) or index.get("expand_timesteps"):
            holds = "two transformers" if experts else "one transformer"
            holds += " with a clock per token" if index.get("expand_timesteps") else ""
            raise pretrained.PretrainedError(
                f"model.path={path} holds {holds}, which the {cls.family} adapter does not read: "
                "use model=wan22_a14b for Wan2.2 T2V A14B, and wan21_14b, wan21_1_3b or "
                "wan21_i2v_14b for Wan2.1; other Wan2.2 checkpoints are not supported"
            )

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        return self.network(
            hidden_states=latents,
            timestep=sigmas * 1000,  # the network counts from 0 to 1000
            encoder_hidden_states=condition["text"],
            return_dict=False,
        )[0]
