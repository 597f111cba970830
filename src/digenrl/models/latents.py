"""Latent geometry: strides and nearest valid sizes, the 2x2 packing of FLUX, per-channel scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

CHANNELS, STRIDE = 16, 8
"""Latent channels of most families; pixels per latent pixel and side."""


def require_multiple(name: str, value: int, stride: int, offset: int = 0) -> None:
    """Raise ValueError naming the nearest valid values unless value = offset + k * stride with
    value > 0."""
    if value > 0 and (value - offset) % stride == 0:
        return
    below = (value - offset) // stride * stride + offset
    nearest = [str(size) for size in (below, below + stride) if size > 0]
    rule = f"a multiple of {stride}" if offset == 0 else f"{offset} + a multiple of {stride}"
    raise ValueError(
        f"sampling.{name}={value} is not {rule}; nearest valid: "
        f"{' or '.join(nearest or [str(stride)])}"
    )


def pack(latents: Tensor) -> Tensor:
    """Pack [B, C, h, w] -> tokens [B, (h/2)(w/2), 4C]: each token is one 2x2 patch, channel-major
    (FLUX's layout)."""
    batch, channels, height, width = latents.shape
    patches = latents.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, (height // 2) * (width // 2), channels * 4)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Invert `pack`: tokens [B, (h/2)(w/2), 4C] -> [B, C, height, width] in latent pixels."""
    batch, _, channels = tokens.shape
    patches = tokens.view(batch, height // 2, width // 2, channels // 4, 2, 2).permute(
        0, 3, 1, 4, 2, 5
    )
    return patches.reshape(batch, channels // 4, height, width)


def token_positions(rows: int, columns: int, device: torch.device | None = None) -> Tensor:
    """Return rotary positions [rows * columns, 3] of packed tokens as FLUX counts them: (0, row,
    column).

    They are made on `device`, because a copy from the processor in every forward would have to be
    waited for.
    """
    axes = torch.arange(rows, device=device), torch.arange(columns, device=device)
    return pad(torch.cartesian_prod(*axes).view(rows * columns, 2), (1, 0))


def rescale(latents: Tensor, config: Any) -> Tensor:
    """Invert `unscale`."""
    return (latents - config.shift_factor) * config.scaling_factor


def unscale(latents: Tensor, config: Any) -> Tensor:
    """Return latents in the autoencoder's own scale, from latents of unit scale (FLUX.1 and
    SD3.5)."""
    return latents / config.scaling_factor + config.shift_factor


def normalise(latents: Tensor, config: Any) -> Tensor:
    """Invert `denormalise`."""
    mean, std = _channels(latents, config)
    return (latents - mean) / std


def denormalise(latents: Tensor, config: Any) -> Tensor:
    """Return Wan's latents [B, C, f, h, w] in the autoencoder's own scale, z * std + mean, from
    latents of unit scale."""
    mean, std = _channels(latents, config)
    return latents * std + mean


def _channels(latents: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of each channel, in a shape that broadcasts."""
    shape = (1, config.z_dim, 1, 1, 1)
    mean = torch.tensor(config.latents_mean, device=latents.device, dtype=latents.dtype).view(shape)
    std = torch.tensor(config.latents_std, device=latents.device, dtype=latents.dtype).view(shape)
    return mean, std
