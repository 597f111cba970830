"""What no reward sees, for any model of pictures or videos: variety within a prompt, and distance
to pictures that one trusts, both between CLIP embeddings. The metric objects are torchmetrics'.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics.aggregation import MeanMetric
from torchmetrics.functional import pairwise_cosine_similarity
from torchmetrics.image.kid import KernelInceptionDistance
from torchvision.transforms.v2.functional import pil_to_tensor

from digenrl.images.reader import FORMATS, PICTURES, list_files, read_picture
from digenrl.types import Prompt
from reward_models.clip_backbone import ClipBackbone
from reward_models.weights import BUILDS

_MOST_PIXELS = 1 << 28
_SUBSETS = 10
"""Draws from the larger of two sets of unequal size."""


class ClipStatistics:
    """Statistics of an evaluation, for `callbacks.evaluation.statistics`. CLIP is in memory only
    while they are computed.

    * `clip_diversity`: mean cosine distance between two samples of one prompt, averaged over
      prompts; 0 = all alike. A video counts as the mean of its frames. NaN when no prompt has two
      samples.
    * `clip_kid`, with a `reference`: the squared maximum mean discrepancy of KID (arXiv:1801.01401)
      between the samples' frames and the reference's. Features are unit CLIP embeddings in place of
      Inception's, and the kernel is (cosine + 1)^3. The estimate is unbiased, so it is a little
      below 0 if both are alike. Only runs that evaluate equally many pictures can be compared.

    Random features measure nothing, so the tiny build calls both `tiny/...`.

    Args:
        path: a CLIP checkpoint, directory or hub id; the tiny build needs none.
        build: "real" or "tiny".
        reference: a folder of pictures, or the samples/eval-0.npz of a run, which
            is its base model; None = no `clip_kid`.
        max_reference: number of reference files that are read, in natural order of name.
        frames: frames taken from a video.
        device: "auto", or as torch reads it.
        dtype: dtype of the model.

    Raises:
        ValueError: unknown build, no path for the real one, `max_reference` below 2, or no
            reference of two pictures.
    """

    def __init__(
        self,
        path: str | None = None,
        build: str = "real",
        reference: str | None = None,
        max_reference: int = 1000,
        frames: int = 4,
        device: str = "auto",
        dtype: str = "float32",
    ) -> None:
        if build not in BUILDS or (build == "real" and path is None):
            raise ValueError(
                f"ClipStatistics got build={build!r}, path={path!r}: build=real with a path, or "
                "build=tiny"
            )
        if max_reference < 2:
            raise ValueError(
                "ClipStatistics compares with at least two pictures, got "
                f"max_reference={max_reference}"
            )
        self._reference = None if reference is None else Path(reference)
        if self._reference is not None and len(list(pictures_of(self._reference, 2))) < 2:
            raise ValueError(
                f"reference={reference} holds fewer than two pictures ({', '.join(PICTURES)}): "
                "give a folder of them, "
                "or the samples/eval-0.npz of a run"
            )
        self._wanted: Tensor | None = None
        self._max_reference, self._frames = max_reference, frames
        self._options = (path, build, device, dtype)
        self._prefix = "tiny/" if build == "tiny" else ""

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Statistics of samples [N, C, H, W] or [N, F, C, H, W] in [0, 1] and their N prompts."""
        clip = ClipBackbone(*self._options)
        frames = clip.frames(media, self._frames).cpu()
        found = {"clip_diversity": _spread(frames.mean(1), prompts)}
        if self._reference is not None:
            if self._wanted is None:  # one after another, because sizes differ
                pictures = pictures_of(self._reference, self._max_reference)
                self._wanted = torch.cat(
                    [clip.frames(one[None] / 255.0, self._frames)[0].cpu() for one in pictures]
                )
            found["clip_kid"] = _kid(frames.flatten(0, 1), self._wanted)
        return {f"{self._prefix}{name}": value for name, value in found.items()}


def pictures_of(reference: Path, most: int) -> Iterator[Tensor]:
    """Yield up to `most` pictures [C, H, W] or videos [F, C, H, W], uint8; none where there is no
    such reference."""
    if reference.suffix == ".npz" and reference.is_file():
        with np.load(reference, allow_pickle=False) as arrays:
            yield from torch.from_numpy(arrays["media"][:most])
        return
    for file in list_files(reference, PICTURES)[:most] if reference.is_dir() else ():
        try:
            yield pil_to_tensor(read_picture(file, FORMATS, _MOST_PIXELS))
        except (OSError, ValueError, SyntaxError) as error:
            raise ValueError(f"reference: {file}: cannot be shown: {error}") from error


def _spread(samples: Tensor, prompts: Sequence[Prompt]) -> float:
    """Return mean cosine distance of two samples [N, D] of one prompt."""
    rows: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows.setdefault(prompt.uid, []).append(row)
    # Rank zero measures alone: a metric that met the other ranks would wait for ever.
    spread = MeanMetric(sync_on_compute=False)
    for own in (samples[rows] for rows in rows.values() if len(rows) > 1):
        spread.update(1 - pairwise_cosine_similarity(own).sum() / (len(own) * (len(own) - 1)))
    return float(spread.compute()) if spread.update_called else float("nan")


def _kid(samples: Tensor, wanted: Tensor) -> float:
    """KID between embeddings [N, D] and [R, D]; the larger set is thinned with a seed of its
    own."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.filterwarnings(
            "ignore", "Metric `Kernel Inception Distance` will save", UserWarning
        )
        torch.manual_seed(0)
        kid = KernelInceptionDistance(
            nn.Identity(),
            subsets=_SUBSETS,
            subset_size=min(len(samples), len(wanted)),
            gamma=1.0,
            sync_on_compute=False,
        )
        kid.update(wanted, real=True)
        kid.update(samples, real=False)
        return float(kid.compute()[0])
