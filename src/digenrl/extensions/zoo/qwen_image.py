"""Qwen-Image (arXiv:2508.02324): Qwen2.5-VL text, norm-preserving guidance, latents packed into
tokens [N, 64].

The editing models read an image twice. The language model sees the image before the text, and the
image's tokens follow those of the noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import (
    CONDITION_IMAGE_SIZE,
    calculate_dimensions,
)
from torch import Tensor
from torch.nn.functional import pad

from digenrl.models.flux import ATTENTION
from digenrl.models.latents import pack_latents, unpack_latents
from digenrl.models.lora import Names
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.models.pipeline_codec import DiffusersCodec
from digenrl.models.scales import denormalise_latents, normalise_latents
from digenrl.models.shared import require_template
from digenrl.models.wording import Wording

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

TEMPLATE_TOKENS, EDIT_TEMPLATE_TOKENS = 34, 64
"""Tokens of the chat template before the prompt (before the image), which the pipeline drops from
the hidden states."""


class QwenImageCodec(DiffusersCodec):
    """Qwen2.5-VL texts, images as packed tokens."""

    vae_class = AutoencoderKLQwenImage
    packed = True

    def encode_text(self, pipeline: DiffusionPipeline, text: str) -> dict[str, Tensor]:
        """Return Qwen2.5-VL states [1, max_sequence_length, d], zero-padded, and the mask [1,
        max_sequence_length]."""
        self.report_long_prompt(pipeline.tokenizer, text, self.max_sequence_length)
        embeddings, mask = pipeline.encode_prompt(
            text, device=pipeline.device, max_sequence_length=self.max_sequence_length
        )
        return self._pad_text(embeddings, mask)

    def _pad_text(self, embeddings: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        if mask is None:  # the pipeline's way of saying that every position counts
            mask = embeddings.new_ones(embeddings.shape[:2])
        padding = self.max_sequence_length - embeddings.shape[1]
        return {"text": pad(embeddings, (0, 0, 0, padding)), "mask": pad(mask.bool(), (0, padding))}

    def decode_latents(self, vae: AutoencoderKLQwenImage, latents: Tensor) -> Tensor:
        images = denormalise_latents(
            unpack_latents(latents, *self.image_grid()).unsqueeze(2), vae.config
        )
        return vae.decode(images, return_dict=False)[0][:, :, 0]

    def encode_latents(self, vae: AutoencoderKLQwenImage, pixels: Tensor) -> Tensor:
        latents = normalise_latents(vae.encode(pixels.unsqueeze(2)).latent_dist.mode(), vae.config)
        return pack_latents(latents[:, :, 0])

    def check_encoders(self, pipeline: DiffusionPipeline) -> None:
        """Check that the template before the prompt is exactly the 34 tokens that the pipeline
        drops."""
        require_template(self, pipeline.tokenizer, pipeline.prompt_template_encode, TEMPLATE_TOKENS)


class QwenImagePolicy(DiffusersPolicy):
    """Policy of Qwen-Image; arguments in `DiffusersPolicy`."""

    family = "qwen_image"
    codec_class = QwenImageCodec
    pipelines = ("QwenImagePipeline",)
    transformer_class = QwenImageTransformer2DModel
    attention = ATTENTION
    feed_forward = ("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")
    checkpoint_names: ClassVar[Names] = {}
    unread = frozenset(
        {
            "attn.add_q_proj",
            "attn.norm_added_q",
            "attn.to_add_out",
            "txt_mlp.net.0.proj",
            "txt_mlp.net.2",
        }
    )

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        return self.network(
            hidden_states=latents,
            timestep=sigmas,  # the network multiplies by 1000
            encoder_hidden_states=condition["text"],
            encoder_hidden_states_mask=condition.get("mask"),
            img_shapes=[self.token_grids()] * latents.shape[0],
            return_dict=False,
        )[0]

    def token_grids(self) -> list[tuple[int, int, int]]:
        """Return (frames, rows, columns) of all tokens that `predict` gets, one picture after the
        other."""
        return [(1, self.codec.height // 16, self.codec.width // 16)]

    def guide(self, conditional: Tensor, unconditional: Tensor, scale: float | Tensor) -> Tensor:
        """Apply guidance, rescaled token by token to the norm of the conditional velocity
        (diffusers QwenImagePipeline)."""
        combined = super().guide(conditional, unconditional, scale)
        norm = torch.linalg.vector_norm(conditional, dim=-1, keepdim=True)
        return combined * (norm / torch.linalg.vector_norm(combined, dim=-1, keepdim=True))


class QwenImageEditCodec(QwenImageCodec):
    """Texts with the image that is edited."""

    reads: ClassVar[Mapping[str, tuple[int, int]]] = {"image": (1, 1)}

    def encode_wording(self, pipeline: DiffusionPipeline, wording: Wording) -> dict[str, Tensor]:
        """Return Qwen2.5-VL states of image and text with their mask, as `encode_text` does, and
        the image's tokens.

        The tokens [1, N, 64] are the mode of the autoencoder's distribution.
        """
        image = wording.images[0]
        width, height = calculate_dimensions(CONDITION_IMAGE_SIZE, self.width / self.height)
        seen = pipeline.image_processor.resize(
            image.fit_to_size(self.height, self.width), height, width
        )
        embeddings, mask = pipeline.encode_prompt(
            wording.text, image=[seen], device=pipeline.device
        )
        beside = embeddings.shape[1] - len(pipeline.tokenizer(wording.text).input_ids)
        if beside >= self.max_sequence_length:
            raise ValueError(
                f"model.max_sequence_length={self.max_sequence_length}: the image takes {beside} "
                f"tokens of it, nothing is left for text; set it to {beside + 256} or more"
            )
        self.report_long_prompt(pipeline.tokenizer, wording.text, self.max_sequence_length - beside)
        pixels = self.image_pixels(image).to(self._vae.device, self.vae_dtype)
        return {
            **self._pad_text(embeddings, mask),
            "image": self.encode_latents(self._vae, pixels),
        }

    def check_encoders(self, pipeline: DiffusionPipeline) -> None:
        """Check that the template before the image is exactly the 64 tokens that the pipeline
        drops."""
        require_template(
            self, pipeline.tokenizer, pipeline.prompt_template_encode, EDIT_TEMPLATE_TOKENS
        )


class QwenImageEditPolicy(QwenImagePolicy):
    """Policy of Qwen-Image-Edit from 2509 on, with one image; arguments in `DiffusersPolicy`.

    The image is fitted to the size of the samples. diffusers' pipeline would give the network an
    image of a megapixel.
    """

    family = "qwen_image_edit"
    codec_class = QwenImageEditCodec
    pipelines = ("QwenImageEditPlusPipeline",)

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        both = torch.cat([latents, condition["image"]], dim=1)
        return super().predict(both, sigmas, condition)[:, : latents.shape[1]]

    def token_grids(self) -> list[tuple[int, int, int]]:
        """Return the grids of the noise and of the image."""
        return super().token_grids() * 2
