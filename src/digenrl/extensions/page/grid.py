"""Draw one RL step as a grid of samples (down) and denoising steps (across): which rank wrote each
cell, and when."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from digenrl.extensions.page.style import CYCLE
from digenrl.record.spans import Span
from digenrl.report.read_run import Run
from digenrl.schedule import groups_of_step


@dataclass(frozen=True)
class Grid:
    """Cells of one RL step, as its spans tell."""

    prompts: int
    group_size: int
    written: NDArray[np.float64]
    """[P*G, T] seconds after the step's first span at which a cell was computed; NaN = no span
    tells."""
    writer: NDArray[np.float64]
    """[P*G] rank that generated the sample; NaN = no span tells."""
    trained: NDArray[np.float64]
    """[P] seconds at which a group's training was finished; NaN = no span tells."""


def read_grid(run: Run, step: int) -> Grid:
    """Return the grid of RL step `step` (0-based, as in the spans), from `generate`, `lend` and
    `train` spans.

    A span covers a whole task; its denoising steps are placed evenly inside it.

    Raises:
        ValueError: the run has no generation spans of that step, or its configuration lacks the
            grid's size.
    """
    try:
        data = run.config["data"]
        prompts, group = groups_of_step(data), int(data["group_size"])
        steps, task_size = (
            int(run.config["sampling"]["steps"]),
            int(run.config["sampling"]["task_size"]),
        )
    except KeyError as error:
        raise ValueError(
            f"{run.path}/config.yaml lacks {error}: the size of the grid is unknown"
        ) from error
    tasks: dict[int, list[Span]] = defaultdict(list)
    for span in run.spans:
        if span.step == step and span.stage in ("generate", "lend") and "group" in span.args:
            tasks[int(span.args["group"])].append(span)
    if not tasks:
        known = sorted({span.step for span in run.spans if span.stage == "generate"})
        raise ValueError(
            f"no generation spans of RL step {step}; the run has those of {known[:1]} to "
            f"{known[-1:]}"
        )
    began = min(span.start for spans in tasks.values() for span in spans)
    written = np.full((prompts * group, steps), np.nan)
    writer = np.full(prompts * group, np.nan)
    for number, spans in tasks.items():
        row = number * group
        for span in spans:
            samples = min(int(span.args.get("samples", task_size)), (number + 1) * group - row)
            ends = np.linspace(span.start, span.end, steps + 1)[1:]
            written[row : row + samples] = ends - began
            writer[row : row + samples] = span.rank
            row += samples
    trained = np.full(prompts, np.nan)
    for span in run.spans:
        if span.step == step and span.stage == "train" and "group" in span.args:
            first = int(span.args["group"])
            for place in range(
                first, first + int(span.args.get("groups", 1))
            ):  # a fragment is consecutive groups
                trained[place] = np.nanmax([trained[place], span.end - began])
    return Grid(prompts, group, written, writer, trained)


def draw_grid(grid: Grid) -> Figure:
    """Draw the rank of each row (left), and when each cell was written and its group was trained
    (right)."""
    figure = Figure(
        figsize=(9.2, 1.6 + 0.032 * grid.prompts * grid.group_size), layout="constrained"
    )
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 2.6))
    ranks = [int(rank) for rank in np.unique(grid.writer[~np.isnan(grid.writer)])]
    index = np.full(grid.writer.shape, np.nan)
    for place, rank in enumerate(ranks):
        index[grid.writer == rank] = place
    palette = ListedColormap([CYCLE[place % len(CYCLE)] for place in range(len(ranks))])
    left.imshow(
        index[:, None],
        aspect="auto",
        cmap=palette,
        vmin=-0.5,
        vmax=len(ranks) - 0.5,
        interpolation="nearest",
    )
    left.set_xticks([])
    left.set_title("written by rank")
    handles = [
        Patch(facecolor=palette(place), label=f"rank {rank}") for place, rank in enumerate(ranks)
    ]
    left.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.03), ncols=2)
    image = right.imshow(grid.written, aspect="auto", cmap="viridis", interpolation="nearest")
    right.set_title("written when (each row from left to right)")
    right.set_xlabel("denoising step")
    right.set_xticks(range(grid.written.shape[1]))
    _group_lines(left, grid)
    _group_lines(right, grid)
    left.set_yticks(
        [(place + 0.5) * grid.group_size - 0.5 for place in range(grid.prompts)],
        [f"group {place}" for place in range(grid.prompts)],
    )
    for place, second in enumerate(grid.trained):
        if not np.isnan(second):
            centre = (place + 0.5) * grid.group_size - 0.5
            right.annotate(f"trained by {second:.1f} s", (grid.written.shape[1] - 0.4, centre), va="center", fontsize=8,  # noqa: E501
                           annotation_clip=False)  # fmt: skip
    figure.colorbar(image, ax=right, label="seconds after the step's first task began", pad=0.16)
    return figure


def _group_lines(axes: Axes, grid: Grid) -> None:
    axes.grid(False)
    for place in range(1, grid.prompts):
        axes.axhline(place * grid.group_size - 0.5, color="white", linewidth=1.6)
