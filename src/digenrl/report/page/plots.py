"""Draw every picture of a run by itself. A picture that fails becomes a warning and does not affect
the others."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from functools import partial

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from digenrl.record.run_dir import BEFORE_AFTER, PLOTS, atomic_replace
from digenrl.report.attempt import make_or_warn
from digenrl.report.page import curves, timeline
from digenrl.report.page.comparison import before_after
from digenrl.report.page.style import BLUE, VERMILION, paper_style
from digenrl.report.pictures import Samples, read_samples, sample_files
from digenrl.report.read_run import Run

Plot = Callable[[Run], Figure | None]
"""Function that draws a run, or returns None if the run recorded nothing of this kind."""


def reward_distribution(run: Run) -> Figure | None:
    """Draw the scores of all samples in the first and the last evaluation, one panel per score."""
    files = sample_files(run)
    if len(files) < 2:
        return None
    before, after = read_samples(files[0]), read_samples(files[-1])
    names = [
        name
        for name in before.scores
        if _known_scores(before, name).size and _known_scores(after, name).size
    ]
    if not names:
        return None
    rows, columns = -(-len(names) // 3), min(3, len(names))
    figure = Figure(figsize=(curves.WIDTH, 2.5 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    for axes, name in zip(panels, names, strict=False):
        first, last = _known_scores(before, name), _known_scores(after, name)
        low, high = min(first.min(), last.min()), max(first.max(), last.max())
        edges = [low + (high - low) * index / 24 for index in range(25)] if high > low else 10
        axes.hist(first, bins=edges, color=VERMILION, alpha=0.55, label=f"RL step {before.rl_step}")
        axes.hist(last, bins=edges, color=BLUE, alpha=0.55, label=f"RL step {after.rl_step}")
        curves.finish_axes(axes, name, "samples", "score")
        axes.xaxis.get_major_locator().set_params(integer=False)
        axes.legend(loc="best")
    return figure


def _known_scores(samples: Samples, name: str) -> NDArray[np.float32]:
    """Return the scores of reward `name` without the missing ones."""
    scores = samples.scores.get(name, np.empty(0, np.float32))
    return scores[~np.isnan(scores)]


PICTURES: dict[str, tuple[str, Plot]] = {
    BEFORE_AFTER: ("Before and after: same prompts, same noise", before_after),
    f"{PLOTS}/reward.png": ("Learning", curves.draw_reward),
    f"{PLOTS}/reward_distribution.png": ("Distribution of scores", reward_distribution),
    f"{PLOTS}/diversity.png": ("Variety", curves.draw_diversity),
    f"{PLOTS}/policy.png": ("Policy", curves.draw_policy),
    f"{PLOTS}/timeline.png": ("Role timeline", timeline.draw_timeline),
    f"{PLOTS}/time_by_rank.png": ("Time by rank", timeline.time_by_rank),
    f"{PLOTS}/step_time.png": ("Speed", curves.step_time),
}
"""File inside the run directory -> (heading in the report, how to draw it), in the order of the
report."""


def draw_all(run: Run, warnings: list[str]) -> dict[str, bytes]:
    """Draw every picture that the run's files allow, write it, and return them as PNG by name.
    Failures are added to `warnings`.

    A picture without data is removed, so that no picture of an earlier state of the run stays.
    """
    pictures: dict[str, bytes] = {}
    for name, (_, plot) in PICTURES.items():
        make_or_warn(name, partial(_draw_plot, run, name, plot, pictures), warnings)
    return pictures


def _draw_plot(run: Run, name: str, plot: Plot, pictures: dict[str, bytes]) -> None:
    path = run.path / name
    if path.parent.is_symlink():
        raise OSError(errno.ELOOP, f"{path.parent.name} is a link, which is not followed")
    with paper_style():
        figure = plot(run)
        if figure is None:
            path.unlink(missing_ok=True)
            return
        png = io.BytesIO()
        figure.savefig(png, format="png")
    pictures[name] = png.getvalue()
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_replace(path) as temporary:
        temporary.write_bytes(pictures[name])
