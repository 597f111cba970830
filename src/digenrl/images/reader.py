"""The one reader of picture files: of prompts, of folders that are scored, of references, and of
what a judge is sent. Pillow, no torch.

Whatever a file holds becomes 8 bits of grey or RGB by one rule:

- 16 bits are scaled to 8. Float pictures hold 0 to 1. Other depths are refused, because their white
  is unknown.
- Transparency is laid on white.
- A photograph's orientation is applied.
- A file holds one picture. Of a phone's JPEG with several (MPO) the first counts, and a TIFF's
  thumbnails do not. Animations and further pages are refused.
- Hidden files (`._x.png`) of a folder are no pictures, and `2.png` comes before `10.png`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

_GREY = ("1", "L", "LA", "La")
_DEEP_GREY = ("I;16", "I;16L", "I;16B", "I;16N")
_REDUCED, _PHOTOMETRIC, _WHITE_IS_ZERO = 254, 262, 0
"""Tags of a TIFF: kind of a page, meaning of its numbers."""


class PictureError(ValueError):
    """A file that cannot be shown as it is meant. The message says why, but names no file."""


def read_picture(file: Path | bytes, formats: Sequence[str], max_pixels: int) -> Image:
    """Return the picture of a file, or of its bytes, in mode L if it is grey, else RGB.

    Args:
        formats: decoders of Pillow that may be used. A name decides nothing, and some decoders
            start programs.
        max_pixels: largest width x height, taken from the file's head before anything is decoded.

    Raises:
        PictureError: too large, or not to be shown faithfully.
        OSError, ValueError, SyntaxError: as Pillow, for a file that is broken or no picture.
    """
    from PIL import Image

    opened = io.BytesIO(file) if isinstance(file, bytes) else file
    try:
        with Image.open(opened, formats=tuple(formats)) as one:
            if one.width * one.height > max_pixels:
                raise PictureError(
                    f"has {one.width}x{one.height} pixels, max_pixels = {max_pixels}: scale it "
                    "down, or raise it"
                )
            require_one(one)
            return flatten_picture(one)
    except (OSError, ValueError, SyntaxError):
        raise
    except (
        Exception
    ) as error:  # what else a decoder raises: TypeError of a TIFF's page without a size
        raise PictureError(f"is broken ({type(error).__name__}: {error})") from error


def require_one(opened: Image) -> None:
    """Check that an opened file holds one picture that can be shown.

    Raises:
        PictureError: an animation, further pages, or an unknown depth.
    """
    if opened.format != "MPO" and _count_pages(opened) > 1:
        what = "has several pages" if opened.format == "TIFF" else "is an animation"
        raise PictureError(f"{what}; save one picture of it.")
    if opened.mode in ("I", "F") and opened.format != "TIFF" and opened.format != "PNG":
        raise PictureError(_depth_message(opened))


def flatten_picture(opened: Image) -> Image:
    """Return an opened picture upright, on white, with 8 bits: in mode L if it is grey, else RGB.

    Raises:
        PictureError: its depth is unknown.
    """
    from PIL import Image, ImageOps

    picture = opened
    if opened.mode in _DEEP_GREY or opened.mode in ("I", "F"):
        picture = _in_8_bits(opened)
        picture.info |= {key: opened.info[key] for key in ("exif",) if key in opened.info}
        turned = opened.getexif().get(0x0112, 1)
        picture.getexif()[0x0112] = turned
    upright = ImageOps.exif_transpose(picture)
    grey = upright.mode in _GREY
    if upright.has_transparency_data:
        layer = upright.convert("RGBA")
        upright = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return upright.convert("L" if grey else "RGB")


def _in_8_bits(opened: Image) -> Image:
    """Return a grey picture of 16 bits or of floats in 8 bits."""
    import numpy as np
    from PIL import Image

    values = np.asarray(opened)
    if opened.mode == "F":
        if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= 1):
            raise PictureError(_depth_message(opened))
        scaled, white = values.astype(np.float64) * 255, np.zeros_like(values, dtype=bool)
    elif opened.mode == "I" and not (
        opened.format == "PNG" and values.min() >= 0 and values.max() <= 0xFFFF
    ):  # Pillow before 11 opens a PNG of 16 bits so
        raise PictureError(_depth_message(opened))
    else:
        scaled = values.astype(np.float64) / 257
        white = values == opened.info.get("transparency", -1)
    found = np.rint(scaled).astype(np.uint8)
    if _read_tag(opened, _PHOTOMETRIC) == _WHITE_IS_ZERO:
        found = 255 - found
    found[white] = 255
    return Image.fromarray(found)


def _depth_message(opened: Image) -> str:
    kinds = {"F": "floats beyond 0 to 1", "I": "whole numbers of 32 bits"}
    return (
        f"holds {kinds.get(opened.mode, opened.mode)}, whose white is unknown; save it with 8 or "
        "16 bits a channel."
    )


def _count_pages(opened: Image) -> int:
    """Return the number of pictures in a file, without a TIFF's thumbnails."""
    count = int(getattr(opened, "n_frames", 1))
    if count == 1 or opened.format != "TIFF":
        return count
    full = 0
    for page in range(count):
        opened.seek(page)
        full += not int(_read_tag(opened, _REDUCED) or 0) & 1
    opened.seek(0)
    return full


def _read_tag(opened: Image, tag: int) -> int | None:
    return getattr(opened, "tag_v2", {}).get(tag)


def list_files(folder: Path, suffixes: Collection[str]) -> list[Path]:
    """Return the files of a folder with one of these suffixes in natural order, without hidden
    ones."""
    files = [path for path in folder.iterdir() if path.suffix.lower() in suffixes]
    shown = [path for path in files if not path.name.startswith(".") and path.is_file()]
    return sorted(shown, key=lambda path: natural_order(path.name))


def natural_order(name: str) -> tuple[tuple[str | int, ...], str]:
    """Return the key that sorts names as people count.

    >>> sorted(["10.png", "2.png", "a2b10", "a2b9"], key=natural_order)
    ['2.png', '10.png', 'a2b9', 'a2b10']
    """
    parts = re.split(r"([0-9]+)", name)
    return tuple(int(part) if part.isdigit() else part for part in parts), name
