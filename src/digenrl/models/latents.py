"""Latent geometry: strides and nearest valid sizes, the 2x2 packing of FLUX."""

from __future__ import annotations

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


def pack_latents(latents: Tensor) -> Tensor:
    """Pack [B, C, h, w] -> tokens [B, (h/2)(w/2), 4C]: each token is one 2x2 patch, channel-major
    (FLUX's layout)."""
    batch, channels, height, width = latents.shape
    # [B, C, h/2, 2, w/2, 2] -> [B, h/2, w/2, C, 2, 2]
    patches = latents.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, (height // 2) * (width // 2), channels * 4)


def unpack_latents(tokens: Tensor, height: int, width: int) -> Tensor:
    """Invert `pack_latents`: tokens [B, (h/2)(w/2), 4C] -> [B, C, height, width] in latent
    pixels."""
    batch, _, channels = tokens.shape
    # [B, h/2, w/2, C, 2, 2] -> [B, C, h/2, 2, w/2, 2]
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
