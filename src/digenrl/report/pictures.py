"""Read the samples that each evaluation of a run kept. `report/page` draws them."""

from __future__ import annotations

import io
import math
import os
import re
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from digenrl.record.run_dir import SAMPLES, printable_text
from digenrl.report.find import files_of, open_own
from digenrl.report.media import Track
from digenrl.report.read_run import Run


@dataclass(frozen=True)
class Samples:
    """Samples that one evaluation kept."""

    rl_step: int
    media: NDArray[np.uint8]
    """[N, C, H, W] images or [N, F, C, H, W] videos, C = 1 or 3."""
    prompts: tuple[str, ...]
    """Text of each of the N prompts."""
    scores: dict[str, NDArray[np.float32]]
    """Name -> [N], for every further array with one number per sample."""
    sources: NDArray[np.uint8] | None = None
    """[N, 3, H, W]: image that each sample was made from; None if prompts name no image."""
    sound: Track | None = None
    """Sound of the N samples; None if no reward asked for it."""

    def __repr__(self) -> str:
        size, kinds = list(self.media.shape), len(set(self.prompts))
        return f"Samples(RL step {self.rl_step}, media {size} of {kinds} prompts)"

    @property
    def is_video(self) -> bool:
        """Whether the media have a frame axis."""
        return self.media.ndim == 5


_LARGEST = 4 << 30
"""Most bytes of a file's arrays, when they are read."""
_FREE, _DENSEST = 256 << 20, 200
"""Bytes that a file may hold however short it is, and bytes per byte of a longer one: what pictures
compress to, a hundred times over."""
_MOST_ARRAYS, _LONGEST_HEAD = 256, 16 << 10
"""Most arrays of a file, and most bytes of an array's header. numpy reads a header of any length
before it refuses it."""
_HIGHEST_RATE = 192_000
"""Most samples of sound per second (Hz)."""
_DAMAGES = (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError, RuntimeError)


def _read_headers(
    file: BinaryIO, name: str
) -> dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]]:
    """Return array -> (shape, dtype) of an .npz file, from headers alone.

    Raises:
        ValueError: it is no such file, or its arrays take too many bytes.
    """
    found: dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]] = {}
    total = 0
    length = os.fstat(file.fileno()).st_size
    try:
        with zipfile.ZipFile(file) as archive:
            if len(members := archive.infolist()) > _MOST_ARRAYS:
                raise ValueError(f"{name}: holds {len(members)} arrays; at most {_MOST_ARRAYS}")
            for member in members:
                with archive.open(member) as content:
                    head = io.BytesIO(content.read(_LONGEST_HEAD))
                version = np.lib.format.read_magic(head)
                read = {
                    (1, 0): np.lib.format.read_array_header_1_0,
                    (2, 0): np.lib.format.read_array_header_2_0,
                }[version]
                shape, _, dtype = read(head)
                size = math.prod(shape) * dtype.itemsize
                if min(shape, default=0) < 0 or dtype.hasobject:
                    raise ValueError(f"{name}: {member.filename} is {dtype} {shape}")
                total += size
                found[member.filename.removesuffix(".npy")] = shape, dtype
    except _DAMAGES as error:
        raise ValueError(f"{name}: is no archive of arrays ({error})") from error
    if total > min(_LARGEST, max(_FREE, _DENSEST * length)):
        raise ValueError(
            f"{name}: its arrays take {total} bytes, of {length} in the file; not read"
        )
    file.seek(0)
    return found


def read_samples(path: str | os.PathLike[str]) -> Samples:
    """Read samples/eval-<rl_step>.npz.

    Raises:
        ValueError: the file is damaged, lacks `media` or `prompts`, or their shapes do not fit.
    """
    path = Path(path)
    with open_own(path) as file:
        try:
            return _read_samples(file, path)
        except (*_DAMAGES, OSError, zlib.error) as error:  # OSError: a place before the file
            raise ValueError(f"{path.name}: is damaged ({error})") from error


def _read_samples(file: BinaryIO, path: Path) -> Samples:
    number = re.search(r"(\d+)$", path.stem)
    headers = _read_headers(file, path.name)
    missing = {"media", "prompts"} - headers.keys()
    if missing:
        raise ValueError(
            f"{path.name}: lacks {', '.join(sorted(missing))}; it holds "
            f"{printable_text(', '.join(headers))[:200]}"
        )
    arrays = np.load(file, allow_pickle=False)
    media = arrays["media"]
    prompts = tuple(str(text) for text in arrays["prompts"])
    scores = {
        name: arrays[name]
        for name, (shape, dtype) in headers.items()
        if shape == (len(prompts),) and dtype.kind == "f"
    }
    sources = arrays["sources"] if "sources" in headers else None
    if sources is not None and (
        sources.dtype != np.uint8 or sources.shape != (len(prompts), 3, *media.shape[-2:])
    ):
        raise ValueError(
            f"{path.name}: sources is {sources.dtype} {sources.shape}; use uint8 [N, 3, H, W]"
        )
    if media.dtype != np.uint8 or media.ndim not in (4, 5) or len(media) != len(prompts):
        raise ValueError(
            f"{path.name}: media is {media.dtype} {media.shape} for {len(prompts)} prompts; "
            "use uint8 [N, C, H, W] or [N, F, C, H, W] with one prompt per sample"
        )
    sound = None
    if {"sound", "sound_rate"} <= headers.keys():
        samples, rate = arrays["sound"], arrays["sound_rate"]
        fits = samples.dtype == np.int16 and samples.ndim == 3 and len(samples) == len(prompts)
        if not (fits and samples.size and rate.shape == () and 0 < rate <= _HIGHEST_RATE):
            raise ValueError(
                f"{path.name}: sound is {samples.dtype} {samples.shape} at {rate} Hz for "
                f"{len(prompts)} prompts; use int16 [N, channels, samples]"
            )
        sound = Track(samples, int(rate))
    return Samples(int(number[1]) if number else 0, media, prompts, scores, sources, sound)


def sample_files(run: Run) -> list[Path]:
    """Return the files of the run's evaluation samples by rising rl_step."""
    files = files_of(run.path, SAMPLES, "eval-*.npz")
    return sorted(files, key=lambda path: int(re.sub(r"\D", "", path.stem) or 0))
