"""HunyuanVideo (arXiv:2412.03603): LLaMA and pooled CLIP text, embedded guidance, latents [16, f,
h, w]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from diffusers import AutoencoderKLHunyuanVideo, HunyuanVideoTransformer3DModel
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from torch import Tensor, nn

from digenrl.models import pretrained
from digenrl.models.exchange import attend_together
from digenrl.models.flux import ATTENTION, FEED_FORWARD, SINGLE_ATTENTION
from digenrl.models.lora import Names
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.models.pipeline_codec import DiffusersCodec
from digenrl.models.shared import attend_with, require_template

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffusers import DiffusionPipeline
    from diffusers.models.attention_processor import Attention

TEMPLATE_TOKENS = 95
"""Tokens of the template before the prompt, which the pipeline crops from the hidden states."""


class JointAttention(HunyuanVideoAttnProcessor2_0):
    """Joint attention that a context group computes together.

    Each rank has its part of the video's tokens and all text tokens, whose number need not divide
    by the ranks.

    Args:
        masked: whether text tokens are masked. The network makes a mask even when all tokens
            count, and a mask rules out PyTorch's fast kernels.
    """

    def __init__(self, masked: bool = True) -> None:
        super().__init__()
        self.masked = masked

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        attention_mask = attention_mask if self.masked else None
        if self._parallel_config is None:
            return super().__call__(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
        own = (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k)
        added = (
            (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj),
            (attn.norm_added_q, attn.norm_added_k),
        )
        assert encoder_hidden_states is not None  # the text
        single = attn.add_q_proj is None  # single-stream blocks project both alike
        video = _project_attention(hidden_states, attn.heads, *own)
        text = _project_attention(encoder_hidden_states, attn.heads, *(own if single else added))
        video[:2] = [apply_rotary_emb(part, image_rotary_emb, sequence_dim=1) for part in video[:2]]
        seen, read = attend_together(
            self._parallel_config, video, text, attention_mask, self._attention_backend
        )
        if not single:
            seen, read = attn.to_out[1](attn.to_out[0](seen)), attn.to_add_out(read)
        return seen, read


def _project_attention(
    states: Tensor, heads: int, layers: Sequence[nn.Module], norms: Sequence[nn.Module]
) -> list[Tensor]:
    """Return query, key and value, [B, tokens, heads, d] each."""
    query, key, value = (layer(states).unflatten(2, (heads, -1)) for layer in layers)
    return [norms[0](query), norms[1](key), value]


CONTEXT_PLAN: dict[str, Any] = {
    "rope": {
        part: ContextParallelInput(split_dim=0, expected_dims=2, split_output=True)
        for part in (0, 1)
    },
    "transformer_blocks.0": {"hidden_states": ContextParallelInput(split_dim=1, expected_dims=3)},
    "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
}
"""Division of tokens among ranks in a network with `JointAttention`: video tokens are split, text
is on every rank."""


class HunyuanVideoCodec(DiffusersCodec):
    """LLaMA and CLIP texts, videos."""

    vae_class = AutoencoderKLHunyuanVideo
    temporal_stride = 4

    def pipeline_components(self) -> dict[str, object]:
        """Return the components, with a tokenizer from AutoTokenizer.

        The published model_index names LlamaTokenizerFast, which makes wrong ids from a byte-level
        tokenizer.json under transformers 5.
        """
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            pretrained.folder_of(self.path, "tokenizer"),
            subfolder="tokenizer",
            local_files_only=True,
        )
        return super().pipeline_components() | {"tokenizer": tokenizer}

    def encode_text(self, pipeline: DiffusionPipeline, text: str) -> dict[str, Tensor]:
        """Return LLaMA states [1, max_sequence_length, d] with their mask, and the pooled CLIP
        vector [1, d]."""
        self.report_long_prompt(pipeline.tokenizer, text, self.max_sequence_length)
        self.report_long_prompt(pipeline.tokenizer_2, text, 77)
        embeddings, pooled, mask = pipeline.encode_prompt(
            text, device=pipeline.device, max_sequence_length=self.max_sequence_length
        )
        return {"text": embeddings, "pooled": pooled, "mask": mask}

    def decode_latents(self, vae: AutoencoderKLHunyuanVideo, latents: Tensor) -> Tensor:
        return vae.decode(latents / vae.config.scaling_factor, return_dict=False)[0]

    def check_encoders(self, pipeline: DiffusionPipeline) -> None:
        """Check that the template before the prompt is exactly the 95 tokens that the pipeline
        crops."""
        from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

        require_template(
            self, pipeline.tokenizer, DEFAULT_PROMPT_TEMPLATE["template"], TEMPLATE_TOKENS
        )


CHECKPOINT_NAMES: Names = {
    r"transformer_blocks\.(\d+)\.": {
        ATTENTION[:3]: "double_blocks.{}.img_attn_qkv",
        ATTENTION[4:7]: "double_blocks.{}.txt_attn_qkv",
        ("attn.to_out.0",): "double_blocks.{}.img_attn_proj",
        ("attn.to_add_out",): "double_blocks.{}.txt_attn_proj",
        ("ff.net.0.proj",): "double_blocks.{}.img_mlp.fc1",
        ("ff.net.2",): "double_blocks.{}.img_mlp.fc2",
        ("ff_context.net.0.proj",): "double_blocks.{}.txt_mlp.fc1",
        ("ff_context.net.2",): "double_blocks.{}.txt_mlp.fc2",
    },
    r"single_transformer_blocks\.(\d+)\.": {
        (*SINGLE_ATTENTION, "proj_mlp"): "single_blocks.{}.linear1",
        ("proj_out",): "single_blocks.{}.linear2",
    },
}


class HunyuanVideoPolicy(DiffusersPolicy):
    """Policy of HunyuanVideo text-to-video; arguments in `DiffusersPolicy`.

    Without a second branch of guidance, the rows of a forward have one text length and its blocks
    need no mask. LoRA leaves the token refiner frozen, although its layer names end like those of
    the blocks.
    """

    family = "hunyuan_video"
    codec_class = HunyuanVideoCodec
    pipelines = ("HunyuanVideoPipeline",)
    transformer_class = HunyuanVideoTransformer3DModel
    checkpoint_names = CHECKPOINT_NAMES
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    embedded_guidance = True
    attention = ATTENTION
    feed_forward = FEED_FORWARD
    single_attention = SINGLE_ATTENTION
    single_feed_forward = ("proj_mlp",)
    context_plan = CONTEXT_PLAN

    def keep_padding(self, on: bool) -> None:
        super().keep_padding(on)
        self._unmasked = not on and not self.two_forwards
        for block in self.wrap_units():
            attend_with(block.attn, JointAttention(masked=not self._unmasked))

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        text, mask = condition["text"], condition.get("mask")
        if self._unmasked and mask is not None:  # several prompts
            return self._by_length(latents, sigmas, condition, mask.sum(dim=1))
        guidance = torch.full_like(sigmas, self.guidance_scale).to(self.dtype) * 1000.0
        return self.network(
            hidden_states=latents,
            timestep=sigmas * 1000,
            encoder_hidden_states=text,
            encoder_attention_mask=torch.ones_like(text[..., 0], dtype=torch.bool)
            if mask is None
            else mask,
            pooled_projections=condition["pooled"],
            guidance=guidance,  # the caller multiplies, unlike FLUX
            return_dict=False,
        )[0]

    def _by_length(
        self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor], lengths: Tensor
    ) -> Tensor:
        """Return what `predict` does, with one forward for each text length among the rows."""
        velocity = torch.empty_like(latents)
        for length in lengths.unique().tolist():
            rows = lengths == length
            texts = {"text": condition["text"][rows, :length], "pooled": condition["pooled"][rows]}
            velocity[rows] = self.predict(latents[rows], sigmas[rows], texts)
        return velocity
