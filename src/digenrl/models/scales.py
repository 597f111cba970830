"""Scales of latents: of all channels together (FLUX, SD3.5), or of each channel (Wan)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from diffusers.configuration_utils import FrozenDict


def rescale_latents(latents: Tensor, config: FrozenDict) -> Tensor:
    """Invert `unscale_latents`."""
    return (latents - config.shift_factor) * config.scaling_factor


def unscale_latents(latents: Tensor, config: FrozenDict) -> Tensor:
    """Return latents in the autoencoder's own scale, from latents of unit scale (FLUX.1 and
    SD3.5)."""
    return latents / config.scaling_factor + config.shift_factor


def normalise_latents(latents: Tensor, config: FrozenDict) -> Tensor:
    """Invert `denormalise_latents`."""
    mean, std = _channel_statistics(latents, config)
    return (latents - mean) / std


def denormalise_latents(latents: Tensor, config: FrozenDict) -> Tensor:
    """Return Wan's latents [B, C, f, h, w] in the autoencoder's own scale, z * std + mean, from
    latents of unit scale."""
    mean, std = _channel_statistics(latents, config)
    return latents * std + mean


def _channel_statistics(latents: Tensor, config: FrozenDict) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of each channel, in a shape that broadcasts."""
    shape = (1, config.z_dim, 1, 1, 1)  # broadcasts over [B, C, f, h, w]
    mean = torch.tensor(config.latents_mean, device=latents.device, dtype=latents.dtype).view(shape)
    std = torch.tensor(config.latents_std, device=latents.device, dtype=latents.dtype).view(shape)
    return mean, std
