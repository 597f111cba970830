"""The one reader of picture files: of prompts, of folders that are scored, of references, and of
what a judge is sent. Pillow, no torch.

Whatever a file holds becomes 8 bits of grey or RGB by one rule:

- 12 and 16 bits are scaled to 8. Float pictures hold 0 to 1. Other depths and signed numbers are
  refused, because their white is unknown.
- Colours are sRGB. A colour profile (ICC) is applied.
- Transparency is laid on white.
- A photograph's orientation is applied.
- A file holds one picture. Of a phone's JPEG with several (MPO) the first counts, and a TIFF's
  thumbnails do not. Animations and further pages are refused.
- Hidden files (`._x.png`) of a folder are no pictures, and `2.png` comes before `10.png`. A picture
  of another kind (HEIC) and a link that leads nowhere are refused, so that none is missed.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

_GREY = ("1", "L", "LA", "La")
_DEEP_GREY = ("I;16", "I;16L", "I;16B", "I;16N")
_REDUCED, _BITS, _PHOTOMETRIC, _SAMPLE_FORMAT = 254, 258, 262, 339
"""Tags of a TIFF: kind of a page, bits of a number, meaning of numbers, their form."""
_WHITE_IS_ZERO, _SIGNED = 0, 2
_TO_8_BITS = {"L;2": 85.0, "L;4": 17.0, "RGB;16B": 1 / 256}
"""What Pillow multiplies a PNG's numbers with, but not the number that means transparent."""


PICTURES = (".bmp", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
FORMATS = ("BMP", "JPEG", "PNG", "TIFF", "WEBP")
"""Suffixes of the pictures of a folder, and the decoders of Pillow that read them."""
VIDEOS = (".avi", ".gif", ".mkv", ".mov", ".mp4", ".webm")
_UNREAD = (".apng", ".avif", ".heic", ".heif", ".jp2", ".jxl", ".m4v", ".mpeg", ".mpg", ".wmv")
"""Suffixes of pictures and videos that nothing here reads."""


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

    try:
        # Of a path, Pillow would map the file, with height and width exchanged in turned TIFFs.
        with (
            io.BytesIO(file) if isinstance(file, bytes) else file.open("rb") as opened,
            Image.open(opened, formats=tuple(formats)) as one,
        ):
            if one.width * one.height > max_pixels:
                raise PictureError(
                    f"has {one.width}x{one.height} pixels, max_pixels = {max_pixels}: scale it "
                    "down, or raise it"
                )
            require_one(one)
            return flatten_picture(one)
    except Image.UnidentifiedImageError as error:
        raise PictureError(f"is no {', '.join(formats[:-1])} or {formats[-1]} file") from error
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
    """Return an opened picture upright, in sRGB, on white, with 8 bits: in mode L if it is grey,
    else RGB.

    Raises:
        PictureError: its depth is unknown, or its colour profile cannot be applied.
    """
    from PIL import Image, ImageOps

    if opened.format == "PNG" and (tile := getattr(opened, "tile", None)):
        _scale_transparent(opened, _TO_8_BITS.get(tile[0][3], 1.0))
    picture = opened
    if opened.mode in _DEEP_GREY or opened.mode in ("I", "F"):
        picture = _in_8_bits(opened)
        picture.info |= {key: opened.info[key] for key in ("exif",) if key in opened.info}
        turned = opened.getexif().get(0x0112, 1)
        picture.getexif()[0x0112] = turned
    elif _read_tag(opened, _SAMPLE_FORMAT) == _SIGNED:
        raise PictureError(_depth_message(opened))
    upright = ImageOps.exif_transpose(picture)
    grey = upright.mode in _GREY
    if upright.has_transparency_data:
        layer = upright.convert("RGBA")
        upright = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return _in_srgb(upright, opened.info).convert("L" if grey else "RGB")


def _scale_transparent(opened: Image, factor: float) -> None:
    """Multiply the value that means transparent, as Pillow does with all others."""
    key = opened.info.get("transparency")
    if isinstance(key, int):
        opened.info["transparency"] = int(key * factor)
    elif isinstance(key, tuple):
        opened.info["transparency"] = tuple(int(each * factor) for each in key)


def _in_srgb(picture: Image, info: Mapping[Any, Any]) -> Image:
    """Apply the colour profile, or else a PNG's gamma, that `info` of a file names."""
    if profile := info.get("icc_profile"):
        return _apply_profile(picture, profile)
    # 1 / 2.2 is sRGB's own. Files that say sRGB may repeat a gamma for old readers.
    exponent = 1 / (2.2 * (info.get("gamma") or 1 / 2.2))
    if "srgb" in info or abs(exponent - 1) < 0.02:
        return picture
    flat = picture.convert("L" if picture.mode in _GREY else "RGB")
    curve = [round(255 * (level / 255) ** exponent) for level in range(256)]
    return flat.point(curve * len(flat.getbands()))


def _apply_profile(picture: Image, profile: bytes) -> Image:
    from PIL import ImageCms

    try:
        found = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        space = found.profile.xcolor_space.strip()
        if ImageCms.getProfileDescription(found).startswith("sRGB") or picture.mode == "LAB":
            return picture
        mode = {"GRAY": "L", "RGB": "RGB", "CMYK": "CMYK"}[space]
        if (mode == "CMYK") != (picture.mode == "CMYK"):
            raise PictureError(
                f"its colours are {picture.mode}, and its colour profile is of {space}; save it "
                "without the profile, or as sRGB."
            )
        target = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
        done = ImageCms.profileToProfile(picture.convert(mode), found, target, outputMode="RGB")
    except (ImageCms.PyCMSError, KeyError, OSError) as error:
        raise PictureError(
            f"its colour profile cannot be applied ({error}); save it as sRGB."
        ) from error
    assert done is not None  # None is of a picture that is changed in place
    return done


def _in_8_bits(opened: Image) -> Image:
    """Return a grey picture of 12 or 16 bits or of floats in 8 bits."""
    import numpy as np
    from PIL import Image

    bits = _read_tag(opened, _BITS) or 16
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
        scaled = values.astype(np.float64) * 255 / (2**bits - 1)
        white = values == opened.info.get("transparency", -1)
    found = np.rint(scaled).astype(np.uint8)
    if _read_tag(opened, _PHOTOMETRIC) == _WHITE_IS_ZERO:
        found = 255 - found
    found[white] = 255
    return Image.fromarray(found)


def _depth_message(opened: Image) -> str:
    kinds = {"F": "floats beyond 0 to 1", "I": "whole numbers of 32 bits", "L": "signed numbers"}
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
    """Return a TIFF's number, the first where there is one for each channel."""
    found = getattr(opened, "tag_v2", {}).get(tag)
    return found[0] if isinstance(found, tuple) else found


def list_files(folder: Path, suffixes: Collection[str]) -> list[Path]:
    """Return the files of a folder with one of these suffixes in natural order, without hidden
    ones.

    Raises:
        PictureError: a file is a picture or video of another kind, or a link that leads nowhere.
    """
    shown = [path for path in folder.iterdir() if not path.name.startswith(".")]
    files = [path for path in shown if path.suffix.lower() in (*suffixes, *_UNREAD, *VIDEOS)]
    for path in files:
        if not path.exists():
            raise PictureError(f"{path}: is a link to nothing; fetch its file, or remove it.")
        if path.is_file() and path.suffix.lower() not in suffixes:
            kinds = ", ".join(sorted(suffixes))
            raise PictureError(f"{path}: is not read here ({kinds}); convert it, or remove it.")
    files = [path for path in files if path.is_file()]
    return sorted(files, key=lambda path: natural_order(path.name))


def natural_order(name: str) -> tuple[tuple[str | int, ...], str]:
    """Return the key that sorts names as people count.

    >>> sorted(["10.png", "2.png", "a2b10", "a2b9"], key=natural_order)
    ['2.png', '10.png', 'a2b9', 'a2b10']
    """
    parts = re.split(r"([0-9]+)", name)  # every second part is a number
    return tuple(int(part) if place % 2 else part for place, part in enumerate(parts)), name
