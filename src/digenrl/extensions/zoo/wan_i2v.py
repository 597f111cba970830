"""Wan2.1 image-to-video (arXiv:2503.20314).

The network reads the first frame twice: as channels beside the noise, and as a CLIP's states that
join the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from digenrl.models.scales import normalise_latents
from digenrl.models.wan import WanCodec, WanPolicy
from digenrl.models.wording import Wording

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class WanImageToVideoCodec(WanCodec):
    """Wan2.1's texts and videos, and the first frame."""

    text_length = 512
    reads: ClassVar[Mapping[str, tuple[int, int]]] = {"image": (1, 1)}

    def encode_wording(self, pipeline: DiffusionPipeline, wording: Wording) -> dict[str, Tensor]:
        """Return the conditioning of the text, and `vision` and `frame` of the image.

        `vision` [1, tokens, d] has the CLIP's last states but one. `frame` [1, 20, f, h, w] has 4
        channels that mark the given frames (one per frame of a latent frame), then the latents of a
        video that is grey behind its first frame.
        """
        picture = wording.images[0].fit_to_size(self.height, self.width)
        video = pad(
            self.image_pixels(wording.images[0]).unsqueeze(2), (0, 0, 0, 0, 0, self.frames - 1)
        )
        encoded = self._vae.encode(video.to(self._vae.device, self.vae_dtype)).latent_dist.mode()
        given = torch.zeros(1, 4, *encoded.shape[2:], device=encoded.device)
        given[:, :, 0] = 1.0
        frame = torch.cat([given, normalise_latents(encoded.float(), self._vae.config)], dim=1)
        vision = pipeline.encode_image(picture, pipeline.image_encoder.device)
        return {**super().encode_wording(pipeline, wording), "vision": vision, "frame": frame}


class WanImageToVideoPolicy(WanPolicy):
    """Wan2.1 image-to-video 14B; arguments in `DiffusersPolicy`.

    The CLIP sees the image fitted to the size of the video, as the autoencoder does. diffusers'
    pipeline gives the CLIP the whole image.
    """

    family = "wan_i2v"
    codec_class = WanImageToVideoCodec
    pipelines = ("WanImageToVideoPipeline",)
    context_plan: ClassVar[dict[str, Any]] = {}  # image tokens join the text
    attention = (*WanPolicy.attention, "attn2.add_k_proj", "attn2.add_v_proj")

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        return self.network(
            hidden_states=torch.cat([latents, condition["frame"]], dim=1),
            timestep=sigmas * 1000,
            encoder_hidden_states=condition["text"],
            encoder_hidden_states_image=condition["vision"],
            return_dict=False,
        )[0]
