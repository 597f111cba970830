"""Qwen-Image 2.1: Qwen3-VL text, one stream of text and image tokens, latents [N, 64] of 16 x 16
pixels.

Text is read causally and at noise level 0. The image reads the text and itself.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING

import diffusers
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor
from torch.nn.functional import pad

from digenrl.extensions.zoo.blocks import run_block
from digenrl.extensions.zoo.since import require_diffusers
from digenrl.models import latents as sizes
from digenrl.models import pretrained
from digenrl.models.lora import Names
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.models.pipeline_codec import DiffusersCodec
from digenrl.models.scales import denormalise_latents

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin
    from diffusers.models.attention_processor import Attention

require_diffusers("0.42", "QwenImage21Transformer2DModel", "AutoencoderKLQwenImage21")


class RowAttention:
    """Attention of text to the text before it and of the image to everything, with a rotary table
    for each row."""

    _attention_backend = None
    _parallel_config = None

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        rotary_emb: Tensor,
        segments: int,
        attention_mask: Tensor | None = None,
        **_: object,
    ) -> Tensor:
        """Return the layer's output. `segments` counts the text tokens, the first of each row."""
        query, key, value = (
            layer(hidden_states).unflatten(-1, (attn.heads, -1))
            for layer in (attn.to_q, attn.to_k, attn.to_v)
        )
        query = _apply_rotary(attn.norm_q(query), rotary_emb).to(value)
        key = _apply_rotary(attn.norm_k(key), rotary_emb).to(value)
        given = {"backend": self._attention_backend, "parallel_config": self._parallel_config}
        texts = (part[:, :segments] for part in (query, key, value))
        read = [
            dispatch_attention_fn(*texts, is_causal=True, **given),
            dispatch_attention_fn(
                query[:, segments:], key, value, attn_mask=attention_mask, **given
            ),
        ]
        return attn.to_out[1](attn.to_out[0](torch.cat(read, dim=1).flatten(2)))


def _apply_rotary(states: Tensor, rotary: Tensor) -> Tensor:
    """Return states [B, tokens, heads, d] times the complex rotary table [B, tokens, 1, d / 2]."""
    pairs = torch.view_as_complex(states.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotary).flatten(3)


class QwenImage21Transformer2DModel(diffusers.QwenImage21Transformer2DModel):
    """diffusers' network for text only, under the name that checkpoints use.

    The original takes the layout of a forward from the values of a mask, for which it waits for the
    GPU. It counts padding in the image's position, and so a velocity would depend on the prompts
    beside it. Here each row has the position that its prompt has alone.
    """

    @wraps(diffusers.QwenImage21Transformer2DModel.__init__)  # type: ignore[misc]  # configurations are read by it
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        for block in self.transformer_blocks:
            block.attn.set_processor(RowAttention())

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        text: Tensor,
        grid: tuple[int, int],
        mask: Tensor | None = None,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        """Return the velocity.

        Args:
            hidden_states: [B, N, 64], rows and columns of `grid`.
            timestep: [B], sigma.
            text: [B, tokens, d]; mask: [B, tokens], which of them are read, None = all.
        """
        words, target = text.shape[1], None
        states = torch.cat([self.txt_in(text), self.img_in(hidden_states)], dim=1)
        levels = timestep.to(states)
        if self.config.causal_condition:  # text reads the last row of the table
            levels = torch.cat([levels, levels.new_zeros(1)])
            target = torch.arange(states.shape[1], device=states.device) >= words
        clock = self.time_text_embed(levels, states)
        modulation = self.modulation(clock)
        lengths, read = levels.new_full((len(text),), words, dtype=torch.float32), None
        if mask is not None:
            lengths = mask.sum(dim=1).float()
            read = pad(mask.bool(), (0, hidden_states.shape[1]), value=True)[:, None, None]
        rotary = self.rotary_table(lengths, words, grid)
        given = modulation, rotary, read, target, None, None, None, words
        for block in self.transformer_blocks:
            states = run_block(self, block, states, *given)
        return (self.proj_out(self.norm_out(states, clock, target))[:, words:],)

    def rotary_table(self, lengths: Tensor, words: int, grid: tuple[int, int]) -> Tensor:
        """Return the complex rotary table [B, tokens, 1, d / 2] of `words` text tokens and a `grid`
        of image tokens.

        A text token has its number on all three axes. An image token has the length [B] of its text
        and its place in the image, counted from the middle.
        """
        order = torch.arange(words, device=lengths.device, dtype=torch.float32)
        places = torch.meshgrid(
            *(torch.arange(side, device=lengths.device) - (side - side // 2) for side in grid),
            indexing="ij",
        )
        axes, rows = [lengths[:, None].expand(-1, places[0].numel())], len(lengths)
        axes += [place.flatten().float().expand(rows, -1) for place in places]
        angles = [
            torch.cat([order.expand(rows, -1), axis], dim=1)[..., None]
            / self.pos_embed.theta ** (torch.arange(0, width, 2, device=order.device) / width)
            for axis, width in zip(axes, self.config.axes_dims_rope, strict=True)
        ]
        joined = torch.cat(angles, dim=-1).unsqueeze(2)
        return torch.polar(torch.ones_like(joined), joined)


class QwenImage21Codec(DiffusersCodec):
    """Qwen3-VL texts, images with an alpha channel."""

    vae_class = diffusers.AutoencoderKLQwenImage21
    channels = 64
    vae_stride = 16
    encoders = ("text_encoder", "processor")

    def encode_text(self, pipeline: DiffusionPipeline, text: str) -> dict[str, Tensor]:
        """Return Qwen3-VL states [1, max_sequence_length, d], zero-padded, and the mask [1,
        max_sequence_length]."""
        tokenizer = pipeline.processor.tokenizer
        around = len(tokenizer(pipeline.prompt_template_t2i).input_ids) - pipeline._drop_idx
        self.report_long_prompt(tokenizer, text, self.max_sequence_length - around)
        states, *_ = pipeline.encode_prompt(text, device=pipeline.device)
        padding = self.max_sequence_length - states.shape[1]  # below 0, the end is cut
        mask = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
        return {"text": pad(states, (0, 0, 0, padding)), "mask": pad(mask, (0, padding))}

    def decode_latents(self, vae: ModelMixin, latents: Tensor) -> Tensor:
        images = latents.transpose(1, 2).unflatten(2, (1, *self.image_grid()))
        decoded = vae.decode(denormalise_latents(images, vae.config), return_dict=False)[0][:, :, 0]
        alpha = decoded[:, 3:] / 2 + 0.5
        return decoded[:, :3] * alpha + 1.0 - alpha

    @classmethod
    def check_size(cls, family: str, height: int, width: int, frames: int) -> None:
        super().check_size(family, height, width, frames)
        for name, side in (("height", height), ("width", width)):  # the pipeline's own multiple
            sizes.require_multiple(name, side, 2 * cls.vae_stride)

    @classmethod
    def latent_shape_of(cls, height: int, width: int, frames: int) -> tuple[int, ...]:
        return (height // cls.vae_stride) * (width // cls.vae_stride), cls.channels


CHECKPOINT_NAMES: Names = {
    r"transformer_blocks\.(\d+)\.": {
        ("img_mlp.gate_layer", "img_mlp.proj"): "transformer_blocks.{}.img_mlp.gate_up",
        **{
            (name,): f"transformer_blocks.{{}}.{name}"
            for name in ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "img_mlp.out")
        },
    }
}
"""Names in the files that ComfyUI reads, where the gate and what it multiplies are one layer."""


class QwenImage21Policy(DiffusersPolicy):
    """Policy of Qwen-Image 2.1 text-to-image; arguments in `DiffusersPolicy`.

    The model is distilled to one forward. Guidance, where it is asked for, is plain. Pictures have
    an alpha channel and are laid on white.
    """

    family = "qwen_image21"
    codec_class = QwenImage21Codec
    pipelines = ("QwenImage21Pipeline",)
    transformer_class = QwenImage21Transformer2DModel
    checkpoint_names = CHECKPOINT_NAMES
    attention = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
    feed_forward = ("img_mlp.proj", "img_mlp.out", "img_mlp.gate_layer")

    @classmethod
    def check_checkpoint(cls, path: str) -> None:
        """Refuse also checkpoints with noise levels of their own."""
        super().check_checkpoint(path)
        if pretrained.model_index(path).get("sample_sigmas"):
            raise pretrained.PretrainedError(
                f"model.path={path} is distilled to noise levels of its own (sample_sigmas), which "
                f"the {cls.family} adapter does not follow: use Qwen/Qwen-Image-2.1"
            )

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        return self.network(
            hidden_states=latents,
            timestep=sigmas,
            text=condition["text"],
            grid=self.codec.image_grid(),
            mask=condition.get("mask"),
        )[0]
