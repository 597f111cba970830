"""Compressibility: the size of a sample as JPEG. A reward without a model, for first runs and for
tests.

Source: incompressibility and compressibility rewards of DDPO (arXiv:2305.13301, section 4); size in
kB of a JPEG at quality 95, as in kvablack/ddpo-pytorch `ddpo_pytorch/rewards.py`.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from digenrl.rewards.protocol import rgb_bytes
from digenrl.types import Prompt


class JpegSize:
    """Negative (or positive) kilobytes of each sample as JPEG; a video scores the mean of its
    sampled frames.

    Args:
        quality: JPEG quality, 1..95.
        maximise: False rewards small files (smooth pictures), True large ones (detail).
        frames: frames sampled from a video.
    """

    weights_digest = "none"

    def __init__(self, quality: int = 95, maximise: bool = False, frames: int = 4) -> None:
        if not 1 <= quality <= 95:
            raise ValueError(f"quality is {quality}: JPEG quality lies in 1..95.")
        self.quality, self.maximise, self.frames = quality, maximise, frames
        self.model_id = f"jpeg_size(quality={quality}, maximise={maximise}, frames={frames})"

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return [B] kilobytes (1000 bytes), negative unless `maximise`."""
        pixels = rgb_bytes(media, self.frames).movedim(-3, -1).contiguous().numpy()
        sizes = torch.tensor(
            [[self._kilobytes(frame) for frame in sample] for sample in pixels], dtype=torch.float32
        )
        return sizes.mean(1) if self.maximise else -sizes.mean(1)

    def _kilobytes(self, frame: np.ndarray) -> float:
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, "JPEG", quality=self.quality)
        return buffer.tell() / 1000
