"""Statistics of pictures that need no model, for cheap scorers and for alarms."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from digenrl.rewards.protocol import as_frames, as_rgb

_LUMA = (0.299, 0.587, 0.114)


def luma(media: Tensor) -> Tensor:
    """[B, F, H, W] brightness (ITU-R BT.601) of images or videos."""
    frames = as_rgb(as_frames(media)).float()
    return (frames * frames.new_tensor(_LUMA).view(3, 1, 1)).sum(2)


def laplacian(frames: Tensor) -> Tensor:
    """[B, F, H, W] 3x3 Laplacian with replicated borders."""
    kernel = frames.new_tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]]).view(1, 1, 3, 3)
    padded = functional.pad(frames.flatten(0, 1).unsqueeze(1), (1, 1, 1, 1), mode="replicate")
    return functional.conv2d(padded, kernel).squeeze(1).unflatten(0, frames.shape[:2])
