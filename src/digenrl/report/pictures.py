"""Read the samples that each evaluation of a run kept. The extension `page` draws them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from digenrl.record.run_dir import SAMPLES
from digenrl.report.find import files_of, open_own
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

    def __repr__(self) -> str:
        size, kinds = list(self.media.shape), len(set(self.prompts))
        return f"Samples(RL step {self.rl_step}, media {size} of {kinds} prompts)"

    @property
    def is_video(self) -> bool:
        """Whether the media have a frame axis."""
        return self.media.ndim == 5


def read_samples(path: str | os.PathLike[str]) -> Samples:
    """Read samples/eval-<rl_step>.npz.

    Raises:
        ValueError: the file lacks `media` or `prompts`, or their shapes do not fit.
    """
    path = Path(path)
    number = re.search(r"(\d+)$", path.stem)
    with open_own(path) as file, np.load(file, allow_pickle=False) as arrays:
        missing = {"media", "prompts"} - set(arrays.files)
        if missing:
            raise ValueError(
                f"{path.name}: lacks {', '.join(sorted(missing))}; it holds "
                f"{', '.join(arrays.files)}"
            )
        media = arrays["media"]
        prompts = tuple(str(text) for text in arrays["prompts"])
        scores = {
            name: arrays[name]
            for name in arrays.files
            if arrays[name].shape == (len(prompts),) and arrays[name].dtype.kind == "f"
        }
        sources = arrays["sources"] if "sources" in arrays.files else None
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
    return Samples(int(number[1]) if number else 0, media, prompts, scores, sources)


def sample_files(run: Run) -> list[Path]:
    """Return the files of the run's evaluation samples by rising rl_step."""
    files = files_of(run.path, SAMPLES, "eval-*.npz")
    return sorted(files, key=lambda path: int(re.sub(r"\D", "", path.stem) or 0))
