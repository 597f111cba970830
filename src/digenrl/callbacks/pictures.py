"""Show pictures of an evaluation in TensorBoard and W&B: the same prompts and noise from step to
step."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from numpy.typing import NDArray

from digenrl import gallery
from digenrl.gallery import Tile

Shown = Mapping[str, Sequence[Tile]]
"""Key in the loggers -> tiles. A key names the same prompt at every evaluation."""


def chosen(
    media: NDArray[np.uint8],
    prompts: Sequence[str],
    score: NDArray[np.float64],
    keep: int,
    samples: int,
    sources: Sequence[NDArray[np.uint8]] | None = None,
) -> dict[str, tuple[Tile, ...]]:
    """Return the pictures of an evaluation for the loggers.

    They are the first `samples` pictures of the first `keep` prompts, and as many of the best and
    of the worst samples. Each is beside its source if prompts name images.
    """
    shown = {}
    for place, (prompt, rows) in enumerate(list(gallery.by_prompt(prompts).items())[:keep]):
        shown[f"eval/{place:02d} {prompt[:40]}"] = gallery.tiles(
            media, prompts, score, rows[:samples], sources
        )
    for name, rows in zip(
        ("best", "worst"), gallery.extremes(score, samples if keep else 0), strict=True
    ):
        if rows:
            shown[f"eval/{name}"] = gallery.tiles(media, prompts, score, rows, sources)
    return shown


def log_pictures(logger: Logger, shown: Shown, step: int) -> None:
    """Give tiles to a logger that can show pictures.

    TensorBoard gets one sheet per key, with a video as a strip of frames. W&B gets each picture by
    itself with score and prompt, and a video as MP4.
    """
    for key, tiles in shown.items():
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(
                key, np.asarray(gallery.sheet(tiles)), step, dataformats="HWC"
            )
        elif isinstance(logger, WandbLogger):
            captions = [f"{gallery.caption(tile)}: {tile.prompt}" for tile in tiles]
            if not tiles[0].is_video:
                logger.log_image(
                    key,
                    [gallery.still(tile.media, tile.source) for tile in tiles],
                    step,
                    caption=captions,
                )
                continue
            with ExitStack() as files:
                videos = [
                    files.enter_context(tempfile.NamedTemporaryFile(suffix=".mp4")) for _ in tiles
                ]
                for file, tile in zip(videos, tiles, strict=True):
                    file.write(gallery.mp4(tile.media, source=tile.source))
                    file.flush()
                logger.log_video(key, [file.name for file in videos], step, caption=captions)
