"""HunyuanVideo 1.5 (arXiv:2511.18870): Qwen2.5-VL text, letters in quotation marks by ByT5,
classifier-free guidance.

Latents are [32, f, h, w]; a latent pixel stands for 16 x 16 pixels."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING

import diffusers
import torch
from diffusers import AutoencoderKLHunyuanVideo15
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts
from torch import Tensor

from digenrl.extensions.zoo.blocks import run_block
from digenrl.extensions.zoo.hunyuan_video import CONTEXT_PLAN, JointAttention
from digenrl.models import pretrained
from digenrl.models.flux import ATTENTION, FEED_FORWARD
from digenrl.models.lora import Names
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.models.pipeline_codec import DiffusersCodec
from digenrl.models.shared import require_template
from digenrl.models.wording import Condition

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

GLYPH = "glyph_"
"""Prefix of the names of ByT5's conditioning."""


class HunyuanVideo15Transformer3DModel(diffusers.HunyuanVideo15Transformer3DModel):
    """diffusers' network for text only, under the name that checkpoints use.

    The original carries the tokens of an absent image under a mask, and sorts text tokens by their
    mask row after row. These shapes depend on values, so the processor waits for the GPU in every
    forward. Attention does not see the order of text, so here tokens stay where they are, and an
    absent image has no tokens.
    """

    @wraps(diffusers.HunyuanVideo15Transformer3DModel.__init__)  # type: ignore[misc]  # configurations are read by it
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        for block in self.transformer_blocks:
            block.attn.set_processor(JointAttention())

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        text: Tensor,
        glyph_text: Tensor,
        mask: Tensor | None = None,
        glyph_mask: Tensor | None = None,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        """Return the velocity of the first channels.

        Args:
            hidden_states: [B, 65, f, h, w]: latents, those of a given frame, and whether it is
                given.
            timestep: [B], 1000 sigma.
            text: [B, tokens, d] of Qwen2.5-VL; mask: [B, tokens], which of them are read, None =
                all.
            glyph_text, glyph_mask: the same of ByT5.
        """
        rotary = self.rope(hidden_states)
        states = self.x_embedder(hidden_states)
        clock = self.time_embed.timestep_embedder(
            self.time_embed.time_proj(timestep).to(states.dtype)
        )
        words = self.context_embedder(text, timestep, mask) + self.cond_type_embed.weight[0]
        glyphs = self.context_embedder_2(glyph_text) + self.cond_type_embed.weight[1]
        both, read = torch.cat([glyphs, words], dim=1), None
        if mask is not None or glyph_mask is not None:
            every = both.new_ones(both.shape[:2], dtype=torch.bool).split(
                [glyphs.shape[1], words.shape[1]], dim=1
            )
            masks = [
                own if given is None else given
                for own, given in zip(every, (glyph_mask, mask), strict=True)
            ]
            told = torch.cat(masks, dim=1)
            both = both.masked_fill(~told.unsqueeze(-1), 0.0)
            pixels = told.new_ones(len(told), states.shape[1])
            read = torch.cat([pixels, told], dim=1).unsqueeze(1).unsqueeze(1)  # of the keys
        for block in self.transformer_blocks:
            states, both = run_block(self, block, states, both, clock, read, rotary)
        velocity = self.proj_out(self.norm_out(states, clock))
        return (velocity.transpose(1, 2).unflatten(2, hidden_states.shape[2:]),)


class HunyuanVideo15Codec(DiffusersCodec):
    """Qwen2.5-VL texts and ByT5 letters, videos."""

    vae_class = AutoencoderKLHunyuanVideo15
    channels = 32
    vae_stride = 16
    temporal_stride = 4

    def trim_condition(self, condition: Condition) -> Condition:
        """Trim text and letters, each by its own mask. If neither branch has letters, none are
        left."""
        letters = {key: value for key, value in condition.items() if GLYPH in key}
        words = {key: value for key, value in condition.items() if key not in letters}
        return super().trim_condition(words) | super().trim_condition(letters)

    def pipeline_components(self) -> dict[str, object]:
        """Return the components with an empty autoencoder: the pipeline asks for its strides even
        to encode text only."""
        config = pretrained.component_config(self.vae_class, self.path, "vae")
        with torch.device("meta"):
            return super().pipeline_components() | {
                "vae": self.vae_class.from_config(config),
                "guider": None,
            }

    def check_encoders(self, pipeline: DiffusionPipeline) -> None:
        """Check that the template before the prompt is exactly the 108 tokens that the pipeline
        cuts."""
        pipeline.vae = None
        before, _ = pipeline.tokenizer.apply_chat_template(
            [
                {"role": "system", "content": pipeline.system_message},
                {"role": "user", "content": "\0"},
            ],
            tokenize=False,
        ).split("\0")
        require_template(
            self, pipeline.tokenizer, before, pipeline.prompt_template_encode_start_idx
        )

    def encode_text(self, pipeline: DiffusionPipeline, text: str) -> dict[str, Tensor]:
        """Return Qwen2.5-VL states [1, max_sequence_length, d], and ByT5 states [1, 256, d] of the
        text in quotation marks, each with its mask."""
        self.report_long_prompt(pipeline.tokenizer, text, self.max_sequence_length)
        self.report_long_prompt(
            pipeline.tokenizer_2, extract_glyph_texts(text) or "", pipeline.tokenizer_2_max_length
        )
        pipeline.tokenizer_max_length = self.max_sequence_length
        states, mask, glyphs, glyph_mask = pipeline.encode_prompt(text, device=pipeline.device)
        return {
            "text": states,
            "mask": mask.bool(),
            f"{GLYPH}text": glyphs,
            f"{GLYPH}mask": glyph_mask.bool(),
        }

    def decode_latents(self, vae: AutoencoderKLHunyuanVideo15, latents: Tensor) -> Tensor:
        """Decode one sample at a time, because the mask of the autoencoder's attention is made for
        one sample."""
        rows = (latents / vae.config.scaling_factor).split(1)
        return torch.cat([vae.decode(row, return_dict=False)[0] for row in rows])


CHECKPOINT_NAMES: Names = {
    r"transformer_blocks\.(\d+)\.": {
        **{
            (ours,): f"double_blocks.{{}}.{theirs}"
            for ours, theirs in zip(
                ATTENTION,
                (
                    *(f"img_attn_{part}" for part in ("q", "k", "v", "proj")),
                    *(f"txt_attn_{part}" for part in ("q", "k", "v", "proj")),
                ),
                strict=True,
            )
        },
        ("ff.net.0.proj",): "double_blocks.{}.img_mlp.fc1",
        ("ff.net.2",): "double_blocks.{}.img_mlp.fc2",
        ("ff_context.net.0.proj",): "double_blocks.{}.txt_mlp.fc1",
        ("ff_context.net.2",): "double_blocks.{}.txt_mlp.fc2",
    },
}
"""huggingface/diffusers scripts/convert_hunyuan_video1_5_to_diffusers.py at 38c42b4: no layers are
joined."""


class HunyuanVideo15Policy(DiffusersPolicy):
    """Policy of HunyuanVideo 1.5 text-to-video; arguments in `DiffusersPolicy`.

    LoRA leaves the token refiner frozen, although its layer names end like those of the blocks.
    """

    family = "hunyuan_video15"
    codec_class = HunyuanVideo15Codec
    pipelines = ("HunyuanVideo15Pipeline",)
    lora_pipeline = "HunyuanVideoPipeline"  # its own loads no adapters yet
    transformer_class = HunyuanVideo15Transformer3DModel
    checkpoint_names = CHECKPOINT_NAMES
    attention = ATTENTION
    feed_forward = FEED_FORWARD
    unread = frozenset(
        {
            "attn.add_q_proj",
            "attn.norm_added_q",
            "attn.to_add_out",
            "ff_context.net.0.proj",
            "ff_context.net.2",
        }
    )
    unused = ("image_embedder",)
    context_plan = CONTEXT_PLAN

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        no_frame = torch.zeros_like(latents[:, :1]).expand(-1, latents.shape[1] + 1, -1, -1, -1)
        given = torch.cat([latents, no_frame], dim=1)
        velocity: Tensor = self.network(hidden_states=given, timestep=sigmas * 1000, **condition)[0]
        return velocity
