"""Read pictures and videos on disk as scorer media."""

from __future__ import annotations

import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageSequence
from torch import Tensor

from digenrl import extras
from digenrl.images.reader import (
    FORMATS,
    PICTURES,
    VIDEOS,
    flatten_picture,
    list_files,
    read_picture,
)

_DEMUXERS = {".avi": "avi", ".mkv": "matroska", ".mov": "mov", ".mp4": "mov", ".webm": "matroska"}
"""Suffix -> the reader of ffmpeg. Other readers are not used: those of playlists open further
files."""


class MediaError(ValueError):
    """A file or folder that cannot be scored; the message names it."""


def media_files(folder: Path) -> list[Path]:
    """Return the pictures and videos in `folder`, in natural order of name. Other files, hidden
    ones and subfolders are left out.

    Raises MediaError if there is no such folder, or no picture or video in it, and PictureError as
    `list_files`.
    """
    if not folder.is_dir():
        raise MediaError(f"{folder}: no such folder of pictures or videos.")
    files = list_files(folder, PICTURES + VIDEOS)
    if not files:
        raise MediaError(
            f"{folder}: holds no picture or video ({', '.join(sorted(PICTURES + VIDEOS))})."
        )
    return files


def read_media(path: Path, max_frames: int, max_pixels: int) -> Tensor:
    """Read a picture as [3, H, W] ([1, H, W] if stored grey), or a video as [F, 3, H, W], in fp32
    from 0 to 1.

    F is at most `max_frames`, and F x H x W at most `max_pixels`. `digenrl.images.reader` has the
    rules for pictures.

    Raises:
        MediaError: the file cannot be read, is too large, or cannot be shown faithfully.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            video = path.suffix.lower() in VIDEOS
            pixels = (
                _read_video(path, max_frames, max_pixels)
                if video
                else _read_still(path, max_pixels)
            )
    except ImportError:
        raise
    except Exception as error:  # a decoder raises anything about a broken file: TypeError of a TIFF
        cause = str(error).strip().splitlines()[-1:]  # a decoder's own words may be pages
        raise MediaError(
            f"{path}: cannot be read as a picture or video ({''.join(cause)})."
        ) from error
    return torch.from_numpy(pixels).movedim(-1, -3).float().div_(255)


def _check_size(pixels: int, max_pixels: int) -> None:
    if pixels > max_pixels:
        raise ValueError(
            f"{pixels} pixels or more, max_pixels = {max_pixels}: raise it, or lower max_frames"
        )


def _read_still(path: Path, max_pixels: int) -> np.ndarray:
    picture = np.array(read_picture(path, FORMATS, max_pixels))
    return picture[:, :, None] if picture.ndim == 2 else picture


def _read_animation(path: Path, max_frames: int, max_pixels: int) -> np.ndarray:
    with Image.open(path, formats=("GIF",)) as file:
        frames: list[np.ndarray] = []
        for frame in islice(ImageSequence.Iterator(file), max_frames):
            _check_size((len(frames) + 1) * file.width * file.height, max_pixels)
            frames.append(np.array(flatten_picture(frame).convert("RGB")))
    return np.stack(frames)


def _read_video(path: Path, max_frames: int, max_pixels: int) -> np.ndarray:
    if path.suffix.lower() == ".gif":
        return _read_animation(path, max_frames, max_pixels)
    with extras.named_in_errors("video", "reading videos"):
        import imageio.v3 as imageio
    frames: list[np.ndarray] = []
    own = ["-f", _DEMUXERS[path.suffix.lower()], "-protocol_whitelist", "file"]
    opened: Any = imageio.imopen(path, "r", plugin="FFMPEG")  # type: ignore[call-overload]
    with opened as file:
        height, width = file.read(index=0, input_params=own).shape[:2]
        _check_size(height * width, max_pixels)
        # A header may promise small frames; ffmpeg then refuses larger ones.
        limit = [*own, "-max_pixels", str(max_pixels)]
        for frame in islice(file.iter(input_params=limit), max_frames):
            _check_size((len(frames) + 1) * frame.shape[0] * frame.shape[1], max_pixels)
            frames.append(np.asarray(Image.fromarray(frame).convert("RGB")))
    if not frames:
        raise ValueError("it has no frames")
    return np.stack(frames)
