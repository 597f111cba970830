"""FLUX.1-Kontext (arXiv:2506.15742): edits an image.

The image's tokens follow those of the noise, at rotary positions of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from digenrl.models.flux import FluxCodec, FluxPolicy
from digenrl.models.wording import Wording

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class FluxKontextCodec(FluxCodec):
    """FLUX.1's texts and images, and an image beside each text."""

    reads: ClassVar[Mapping[str, tuple[int, int]]] = {"image": (1, 1)}

    def encode_wording(self, pipeline: DiffusionPipeline, wording: Wording) -> dict[str, Tensor]:
        """Return the conditioning of the text, and the tokens [1, N, 64] of the image: the mode of
        the autoencoder's distribution."""
        pixels = self.image_pixels(wording.images[0]).to(self._vae.device, self.vae_dtype)
        return {
            **super().encode_wording(pipeline, wording),
            "image": self.encode_latents(self._vae, pixels),
        }


class FluxKontextPolicy(FluxPolicy):
    """FLUX.1-Kontext-dev; arguments in `DiffusersPolicy`.

    The image is fitted to the size of the samples. diffusers' pipeline takes one of the sizes of
    the model's training instead.
    """

    family = "flux_kontext"
    codec_class = FluxKontextCodec
    pipelines = ("FluxKontextPipeline",)

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        both = torch.cat([latents, condition["image"]], dim=1)
        return super().predict(both, sigmas, condition)[:, : latents.shape[1]]

    def position_ids(self, device: torch.device) -> Tensor:
        """Return the positions of all tokens; those of the image's tokens begin with a 1."""
        noise = super().position_ids(device)
        return torch.cat([noise, pad(noise[:, 1:], (1, 0), value=1)])
