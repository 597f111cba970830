"""Wan2.1 (arXiv:2503.20314): UMT5 text, classifier-free guidance, latents [16, f, h, w].

Image-to-video reads the first frame twice: as channels beside the noise, and through a CLIP that joins the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from torch import Tensor
from torch.nn.functional import pad

from digenrl.models.latents import denormalise, normalise
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.models.prompt_store import Wording


class WanPolicy(DiffusersPolicy):
    """Wan2.1 text-to-video, 1.3B and 14B; arguments in `DiffusersPolicy`."""

    family = "wan"
    pipelines = ("WanPipeline",)
    transformer_class = WanTransformer3DModel
    vae_class = AutoencoderKLWan
    block_lists = ("blocks",)
    temporal_stride = 4
    attention = tuple(f"attn{i}.{name}" for i in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0"))
    feed_forward = ("ffn.net.0.proj", "ffn.net.2")
    context_plan: ClassVar[dict[str, Any]] = {
        "rope": {part: ContextParallelInput(split_dim=1, expected_dims=4, split_output=True) for part in (0, 1)},
        "blocks.0": {"hidden_states": ContextParallelInput(split_dim=1, expected_dims=3)},
        "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    }

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        return self.network(
            hidden_states=latents, timestep=sigmas * 1000, encoder_hidden_states=condition["text"], return_dict=False
        )[0]

    def encode_text(self, pipeline: Any, text: str) -> dict[str, Tensor]:
        """UMT5 states [1, max_sequence_length, d], zero after the prompt; Wan attends to the zeros, so no mask."""
        self.report_long_prompt(pipeline.tokenizer, text, self.max_sequence_length)
        embeddings, _ = pipeline.encode_prompt(
            text,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
            device=pipeline.device,
        )
        return {"text": embeddings}

    def decode_latents(self, vae: Any, latents: Tensor) -> Tensor:
        return vae.decode(denormalise(latents, vae.config), return_dict=False)[0]


class WanImageToVideoPolicy(WanPolicy):
    """Wan2.1 image-to-video 14B; arguments in `DiffusersPolicy`.

    The CLIP sees the image fitted to the size of the video, as the autoencoder does; diffusers' pipeline gives it the
    whole image.
    """

    family = "wan_i2v"
    pipelines = ("WanImageToVideoPipeline",)
    context_plan: ClassVar[dict[str, Any]] = {}  # image tokens join the text
    text_length = 512
    reads: ClassVar[Mapping[str, tuple[int, int]]] = {"image": (1, 1)}
    attention = (*WanPolicy.attention, "attn2.add_k_proj", "attn2.add_v_proj")

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        return self.network(
            hidden_states=torch.cat([latents, condition["frame"]], dim=1),
            timestep=sigmas * 1000,
            encoder_hidden_states=condition["text"],
            encoder_hidden_states_image=condition["vision"],
            return_dict=False,
        )[0]

    def encode_wording(self, pipeline: Any, wording: Wording) -> dict[str, Tensor]:
        """And `vision` [1, tokens, d], the CLIP's last states but one; `frame` [1, 20, f, h, w]: which frames are given
        (4 channels: those of a latent frame), and the latents of a video that is grey behind its first frame."""
        picture = wording.images[0].fitted(self.height, self.width)
        video = pad(self.pixels(wording.images[0]).unsqueeze(2), (0, 0, 0, 0, 0, self.frames - 1))
        encoded = self._vae.encode(video.to(self._vae.device, self.vae_dtype)).latent_dist.mode()
        given = torch.zeros(1, 4, *encoded.shape[2:], device=encoded.device)
        given[:, :, 0] = 1.0
        frame = torch.cat([given, normalise(encoded.float(), self._vae.config)], dim=1)
        vision = pipeline.encode_image(picture, pipeline.image_encoder.device)
        return {**super().encode_wording(pipeline, wording), "vision": vision, "frame": frame}
