"""Pictures and videos on disk as scorer media."""

from __future__ import annotations

import warnings
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

PICTURES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
VIDEOS = (".avi", ".gif", ".mkv", ".mov", ".mp4", ".webm")


class MediaError(ValueError):
    """A file or folder that cannot be scored; the message names it."""


def media_files(folder: Path) -> list[Path]:
    """Pictures and videos in `folder`, in order of name; other files and subfolders are left out.

    Raises MediaError if there is no such folder, or none of them in it.
    """
    if not folder.is_dir():
        raise MediaError(f"{folder}: no such folder of pictures or videos.")
    files = [path for path in folder.iterdir() if path.suffix.lower() in PICTURES + VIDEOS and path.is_file()]
    if not files:
        raise MediaError(f"{folder}: holds no picture or video ({', '.join(sorted(PICTURES + VIDEOS))}).")
    return sorted(files, key=lambda path: path.name)


def read_media(path: Path, max_frames: int) -> Tensor:
    """fp32 in [0, 1]: a picture as [3, H, W] ([1, H, W] if stored grey), a video as [F, 3, H, W] with F <= max_frames.

    Transparency is laid over white, a photograph's orientation is applied. Raises MediaError.
    """
    try:
        pixels = _video(path, max_frames) if path.suffix.lower() in VIDEOS else _picture(path)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise MediaError(f"{path}: cannot be read as a picture or video ({error}).") from error
    return torch.from_numpy(pixels).movedim(-1, -3).float().div(255)


def _picture(path: Path) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with Image.open(path) as file:
            image: Image.Image = ImageOps.exif_transpose(file)
            if image.has_transparency_data:
                layer = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
            if image.mode in ("1", "L"):
                return np.array(image.convert("L"))[:, :, None]
            return np.array(image.convert("RGB"))


def _video(path: Path, max_frames: int) -> np.ndarray:
    try:
        import imageio.v3 as imageio
    except ImportError as error:
        raise ImportError("reading videos needs imageio: pip install 'digenrl[video]'") from error
    frames = [np.asarray(Image.fromarray(frame).convert("RGB")) for frame in islice(imageio.imiter(path), max_frames)]
    if not frames:
        raise ValueError("it has no frames")
    return np.stack(frames)
