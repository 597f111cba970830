"""Compare samples before and after: the same prompts and noise under the first and the last
evaluated weights."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from digenrl.record.run_dir import atomic_replace
from digenrl.report.page.gallery import film_strip
from digenrl.report.page.style import BLUE, INK, VERMILION, paper_style
from digenrl.report.pictures import Samples, read_samples, sample_files
from digenrl.report.read_run import Run

NARROW, SHORT = 32, 24
"""Pixels up to which pictures are drawn small (ten in a row), and most letters of a prompt for
that."""


def before_after(run: Run) -> Figure | None:
    """Return the figure of samples/before_after.png; None below two evaluations with samples."""
    files = sample_files(run)
    if len(files) < 2:
        return None
    return draw_comparison(read_samples(files[0]), read_samples(files[-1]))


def draw_comparison(before: Samples, after: Samples) -> Figure:
    """Draw samples of `before` above those of `after`, matched by prompt and position. Videos are
    film strips.

    Raises:
        ValueError: the two share no prompt, or hold media of different shapes.
    """
    if before.media.shape[1:] != after.media.shape[1:]:
        raise ValueError(
            f"before has samples of shape {before.media.shape[1:]}, after {after.media.shape[1:]}"
        )
    pairs = _match_samples(before.prompts, after.prompts)
    if not pairs:
        raise ValueError(
            f"no prompt in common between RL steps {before.rl_step} and {after.rl_step}"
        )
    return _draw_grid(before, after, pairs)


def save_comparison(path: Path, before: Samples, after: Samples) -> None:
    """Write the drawing of `draw_comparison` to a file.

    Raises: see `draw_comparison`.
    """
    with paper_style():
        figure = draw_comparison(before, after)
        with atomic_replace(path) as temporary:
            figure.savefig(temporary, format=path.suffix[1:])


def _match_samples(
    before: tuple[str, ...], after: tuple[str, ...]
) -> dict[str, list[tuple[int, int]]]:
    """Return prompt -> [(index before, index after)].

    The k-th sample of a prompt has the same noise in every evaluation.
    """
    places: dict[str, list[int]] = defaultdict(list)
    for index, text in enumerate(after):
        places[text].append(index)
    pairs: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for index, text in enumerate(before):
        taken = len(pairs[text]) if text in pairs else 0
        if taken < len(places[text]):
            pairs[text].append((index, places[text][taken]))
    return dict(pairs)


def _grid_sides(before: Samples, after: Samples) -> list[tuple[NDArray[np.uint8], int, str, str]]:
    """Return (media, index into a pair, title, colour) of each block: the source images if there
    are any, `before`, `after`."""
    source = [] if before.sources is None else [(before.sources, 0, "source", INK)]
    moments = (
        (_film_strips(before.media), 0, _moment_title(before, "before"), VERMILION),
        (_film_strips(after.media), 1, _moment_title(after, "after"), BLUE),
    )
    return [*source, *moments]


def _film_strips(media: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return videos [N, F, C, H, W] as pictures of some frames, one beside the other; pictures
    [N, C, H, W] as they are."""
    return media if media.ndim == 4 else np.stack([film_strip(video) for video in media])


def _draw_grid(before: Samples, after: Samples, pairs: dict[str, list[tuple[int, int]]]) -> Figure:
    height, width = _film_strips(before.media[:1]).shape[-2:]
    narrow = width <= NARROW and max(map(len, pairs)) <= SHORT
    # Most columns and rows; inches of a cell and of the captions; letters in a caption's line.
    prompts, rows, cell, head, letters = (10, 3, 0.72, 0.5, 9) if narrow else (6, 2, 1.55, 0.85, 24)
    if before.is_video:
        prompts, cell, head, letters = 2, 4.6, 0.5, 60
    texts = list(pairs)[:prompts]
    rows = min(rows, max(len(pairs[text]) for text in texts))
    sides = _grid_sides(before, after)
    figure = Figure(
        figsize=(0.75 + cell * len(texts), head + len(sides) * rows * cell * height / width + 0.15)
    )
    blocks = figure.add_gridspec(
        len(sides), 1, hspace=0.1, left=0.75 / figure.get_figwidth(), right=0.995, bottom=0.01,
        top=1 - head / figure.get_figheight(),
    )  # fmt: skip
    for block, (pictures, side, title, colour) in enumerate(sides):
        grid = blocks[block].subgridspec(rows, len(texts), hspace=0.06, wspace=0.06)
        for column, text in enumerate(texts):
            for row in range(rows):
                axes = figure.add_subplot(grid[row, column])
                axes.set_axis_off()
                if row < len(pairs[text]):
                    _draw_sample(axes, pictures[pairs[text][row][side]])
                if block == 0 and row == 0:
                    caption = "\n".join(
                        textwrap.wrap(text, letters, max_lines=3, placeholder=" ...")
                    )
                    axes.set_title(
                        caption, fontsize=8, fontweight="normal", loc="center", color=INK, pad=4
                    )
        box = blocks[block].get_position(figure)
        figure.text(0.3 / figure.get_figwidth(), (box.y0 + box.y1) / 2, title, rotation=90, ha="center", va="center",  # noqa: E501
                    fontsize=9.5, fontweight="bold", color=colour)  # fmt: skip
    return figure


def _draw_sample(axes: Axes, sample: NDArray[np.uint8]) -> None:
    """Draw one picture [C, H, W]. Small pixel images keep their hard edges."""
    image = sample[0] if len(sample) == 1 else np.moveaxis(sample, 0, -1)
    interpolation = "nearest" if image.shape[1] <= 64 else "antialiased"
    axes.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation=interpolation, aspect="equal")


def _moment_title(samples: Samples, word: str) -> str:
    return f"{word}\nbase model" if samples.rl_step == 0 else f"{word}\nRL step {samples.rl_step}"
