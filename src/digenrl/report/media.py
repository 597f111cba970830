"""Samples as files that people open: PNG grids of images, MP4 videos."""

from __future__ import annotations

import math
import tempfile
import wave
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from digenrl import extras

FRAMES_PER_SECOND = 16
"""What Wan2.1 is trained at; HunyuanVideo plays at 24."""


@dataclass(frozen=True)
class Track:
    """Sound of samples, or of one."""

    samples: NDArray[np.int16]
    """[N, channels, samples], or [channels, samples] of one."""
    rate: int
    """Samples per second (Hz)."""

    def of_row(self, row: int) -> Track:
        """Return the sound of sample `row`."""
        return Track(self.samples[row], self.rate)


def encode_mp4(
    frames: NDArray[np.uint8], fps: int = FRAMES_PER_SECOND, sound: Track | None = None
) -> bytes:
    """Return frames [F, H, W, 3] as H.264 MP4, made with the ffmpeg that imageio brings along. With
    the `sound` of the video, the frames last as long as the sound.

    Raises:
        ImportError: imageio is not installed.
    """
    with extras.named_in_errors("video", "writing videos"):
        import imageio.v3 as imageio
    # yuv420p, which every player shows, needs even sides: the last row or column is repeated where
    # one is odd.
    odd = ((0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0))
    options: dict[str, Any] = {"codec": "libx264", "macro_block_size": 1}
    even = np.pad(frames, odd, mode="edge")
    write = partial(imageio.imwrite, "<bytes>", even, plugin="FFMPEG", extension=".mp4", **options)
    if sound is None:
        return write(fps=fps)
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        write_wav(file.name, sound)
        fits = len(frames) * sound.rate / sound.samples.shape[-1]
        return write(fps=fits, audio_path=file.name, audio_codec="aac", ffmpeg_log_level="error")


def write_wav(path: str, sound: Track) -> None:
    """Write the sound of one sample as 16-bit PCM."""
    with wave.open(path, "wb") as file:
        file.setnchannels(len(sound.samples))
        file.setsampwidth(2)
        file.setframerate(sound.rate)
        file.writeframes(sound.samples.T.astype("<i2").tobytes())


def to_uint8(media: Tensor | np.ndarray) -> np.ndarray:
    """Convert [..., C, H, W] in [0, 1] (or already uint8), C 1 or 3 -> [..., H, W, 3] uint8.

    Raises:
        ValueError: a value is not finite, or C is neither 1 nor 3.
    """
    array = media.detach().cpu().float().numpy() if isinstance(media, Tensor) else np.asarray(media)
    if array.ndim < 3 or array.shape[-3] not in (1, 3):
        raise ValueError(f"media must be [..., C, H, W] with C 1 or 3, got shape {array.shape}")
    if array.dtype != np.uint8:
        if not np.isfinite(array).all():
            raise ValueError(
                "media hold values that are not finite: the decoder overflowed; try "
                "model.vae_dtype=float32"
            )
        array = (array.clip(0, 1) * 255).round().astype(np.uint8)
    array = np.moveaxis(array, -3, -1)
    return array if array.shape[-1] == 3 else np.repeat(array, 3, axis=-1)


def image_grid(
    images: Tensor | np.ndarray, columns: int | None = None, gap: int = 2
) -> Image.Image:
    """Return images [N, C, H, W] as one picture with white gaps, row by row; columns =
    ceil(sqrt(N)) unless given."""
    tiles = to_uint8(images)
    count, height, width, _ = tiles.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    canvas = np.full(
        (rows * (height + gap) - gap, columns * (width + gap) - gap, 3), 255, dtype=np.uint8
    )
    for index, tile in enumerate(tiles):
        top, left = index // columns * (height + gap), index % columns * (width + gap)
        canvas[top : top + height, left : left + width] = tile
    return Image.fromarray(canvas)


def write_mp4(path: Path | str, video: Tensor | np.ndarray, fps: int = FRAMES_PER_SECOND) -> None:
    """Write one video [F, C, H, W] as H.264 MP4, with the ffmpeg that imageio brings along."""
    Path(path).write_bytes(encode_mp4(to_uint8(video), fps))
