"""Images that a line of a prompt file names, to edit, to animate or to compare with. Pillow, no
torch.

An image is identified by the digest of its file, never by its path. A prompt keeps its identity
when a data set moves. A file that changes under a run is an error when it is read.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from digenrl.images.reader import PictureError, flatten_picture, require_one

if TYPE_CHECKING:
    from PIL.Image import Image

SAMPLES = ("media", "preferred", "rejected")
"""Roles of the files that are trained on in place of generated samples (`data.samples=files`)."""
PREFERENCE = ("preferred", "rejected")
"""Roles of the files of even and of odd samples of a group, where files are preferences."""
ROLES = ("image", "last_image", "target_image", *SAMPLES)
"""Roles of a prompt's images: `image` is edited or begins a video, `last_image` ends it, scorers
read `target_image`, and `SAMPLES` stand in the place of samples."""
FORMATS = ("PNG", "JPEG", "WEBP")


class ImageError(ValueError):
    """An image that cannot be used. The message says why, but not where the image was named."""


@dataclass(frozen=True)
class ImageLimits:
    """Bounds of one file."""

    max_mib: float = 32.0
    max_pixels: int = 1 << 26
    """Width x height, taken from the file's head before anything is decoded."""


@dataclass(frozen=True)
class PromptImage:
    """One image of a prompt. Two are equal if role and content are."""

    role: str
    """One of `ROLES`."""
    digest: str
    """Digest of the file's bytes."""
    size: int = field(default=0, compare=False)
    """Number of bytes."""
    path: str = field(default="", compare=False)
    """Path of the file; "" for an image that came with a request."""
    data: bytes | None = field(default=None, compare=False, repr=False)
    """The file's bytes if there is no path."""

    def read_content(self) -> bytes:
        """Return the file's bytes.

        Raises:
            ImageError: the file is gone, or has changed since the prompts were read.
        """
        if self.data is not None:
            return self.data
        content = _read_file(self.path)
        if digest_of(content) != self.digest:
            raise ImageError(
                f"{self.path} changed after the prompts were read; start again with the file as it "
                "is."
            )
        return content

    def fit_to_size(self, height: int, width: int) -> Image:
        """Return the picture as RGB of exactly this size: its middle part of that aspect ratio,
        resampled (Lanczos)."""
        from PIL import Image, ImageOps

        with Image.open(io.BytesIO(self.read_content()), formats=FORMATS) as opened:
            picture = flatten_picture(opened).convert("RGB")
        return ImageOps.fit(picture, (width, height), Image.Resampling.LANCZOS)


def edited_images(images: tuple[PromptImage, ...]) -> tuple[PromptImage, ...]:
    """Return the images that the prompt changes: those of role `image`, in the order of the
    file."""
    return tuple(image for image in images if image.role == "image")


def read_image(
    role: str, name: str, folder: Path, limits: ImageLimits | None = None
) -> PromptImage:
    """Return the image that `name` (relative to `folder`, or absolute) means.

    Args:
        limits: decode it once within these bounds, so that a broken file shows here; None = only
            compute its digest.

    Raises:
        ImageError: missing, unreadable, or, with limits, too large, of another format or broken.
    """
    if "://" in name:
        raise ImageError(f"{role} = {name[:80]} is an address; download it and name the file.")
    path = folder / Path(os.path.expanduser(name))
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ImageError("is no regular file; name a picture's file.")
        digest = _cached_digest(str(path), found.st_size, found.st_mtime_ns, limits)
        return PromptImage(role, digest, found.st_size, str(path))
    except OSError as error:
        raise ImageError(
            f"{role} = {name[:200]}: cannot be read ({error.strerror}; looked for {path})."
        ) from error
    except ImageError as error:
        raise ImageError(f"{role} = {name[:200]}: {error}") from error


@lru_cache(maxsize=1 << 20)
def _cached_digest(path: str, size: int, changed_ns: int, limits: ImageLimits | None) -> str:
    """Return the digest of a file as it is, computed once per process. With limits the file is
    checked once."""
    if limits is not None and size > limits.max_mib * 2**20:
        raise ImageError(
            f"has {size / 2**20:.1f} MiB, at most {limits.max_mib:g} (data.image_max_mib)."
        )
    content = _read_file(path)
    if limits is not None:
        check_image(content, limits)
    return digest_of(content)


def check_image(content: bytes, limits: ImageLimits) -> None:
    """Raise ImageError unless `content` is one picture within `limits` that decodes to its end."""
    from PIL import Image

    if len(content) > limits.max_mib * 2**20:
        raise ImageError(
            f"has {len(content) / 2**20:.1f} MiB, at most {limits.max_mib:g} (data.image_max_mib)."
        )
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as picture:
            pixels = picture.width * picture.height
            if pixels > limits.max_pixels:
                raise ImageError(
                    f"has {picture.width}x{picture.height} pixels, at most {limits.max_pixels} "
                    "(data.image_max_pixels): scale it down, or raise the key."
                )
            require_one(picture)
            # A JPEG is read to its end, at an eighth of its size.
            picture.draft("RGB", (max(1, picture.width // 8), max(1, picture.height // 8)))
            flatten_picture(picture)
    except ImageError:
        raise
    except PictureError as error:
        raise ImageError(str(error)) from error
    except Image.UnidentifiedImageError as error:
        raise ImageError(f"is no {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file.") from error
    except Image.DecompressionBombError as error:  # above Pillow's own bound
        raise ImageError(f"has far too many pixels ({error}).") from error
    except (OSError, ValueError, SyntaxError, EOFError, MemoryError) as error:
        raise ImageError(f"is broken ({' '.join(str(error).split())[:120]}).") from error


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading. A pipe is not waited for, and a device is never read.

    Raises:
        OSError: there is no such file, or it is a folder, a pipe or a device (`errno.EINVAL`).
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(descriptor, "rb")


def _read_file(path: str) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise ImageError(f"cannot be read ({error.strerror}; looked for {path}).") from error


def digest_of(content: bytes) -> str:
    """Return the digest by which an image is identified."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
