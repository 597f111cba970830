"""Show pictures of an evaluation in TensorBoard and W&B: the same prompts and noise from step to
step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from numpy.typing import NDArray

from digenrl.report.media import Track
from digenrl.report.page import gallery
from digenrl.report.page.gallery import Tile

Shown = Mapping[str, Sequence[Tile]]
"""Key in the loggers -> tiles. A key names the same prompt at every evaluation."""


def picture_logger(
    media: NDArray[np.uint8],
    prompts: Sequence[str],
    scores: Mapping[str, NDArray[np.float32]],
    weights: Mapping[str, float],
    keep: int,
    samples: int,
    sources: Sequence[NDArray[np.uint8]] | None,
    sound: Track | None = None,
) -> Callable[[Logger, int], None]:
    """Return what gives the pictures of an evaluation to a logger, at a step of the logger's.

    They are the first `samples` pictures of the first `keep` prompts, and as many of the best and
    of the worst samples. Each is beside its source if prompts name images.
    """
    score = gallery.total_scores(scores, weights, len(prompts))
    first = list(gallery.by_prompt(prompts).items())[:keep]
    chosen = {f"eval/{i:02d} {text[:40]}": rows[:samples] for i, (text, rows) in enumerate(first)}
    chosen["eval/best"], chosen["eval/worst"] = gallery.extreme_rows(score, samples)
    shown = {
        key: gallery.make_tiles(media, prompts, score, rows, sources, sound)
        for key, rows in chosen.items()
        if rows
    }
    return partial(_log_pictures, shown)


def _log_pictures(shown: Shown, logger: Logger, step: int) -> None:
    """Give tiles to a logger that can show pictures.

    TensorBoard gets one sheet per key, with a video as a strip of frames. W&B gets each picture by
    itself with score and prompt, and a video as MP4.
    """
    for key, tiles in shown.items():
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(
                key, np.asarray(gallery.draw_sheet(tiles)), step, dataformats="HWC"
            )
        elif isinstance(logger, WandbLogger):
            captions = [f"{gallery.score_caption(tile)}: {tile.prompt}" for tile in tiles]
            if not tiles[0].is_video:
                logger.log_image(
                    key,
                    [gallery.still_image(tile.media, tile.source) for tile in tiles],
                    step,
                    caption=captions,
                )
                continue
            with ExitStack() as files:
                videos = [
                    files.enter_context(tempfile.NamedTemporaryFile(suffix=".mp4")) for _ in tiles
                ]
                for file, tile in zip(videos, tiles, strict=True):
                    file.write(gallery.encode_video(tile))
                    file.flush()
                logger.log_video(key, [file.name for file in videos], step, caption=captions)
