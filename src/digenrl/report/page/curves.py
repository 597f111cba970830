"""Draw curves over RL steps: the rewards, the movement of the policy, and the loss of variety."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from digenrl.report.page.style import BLUE, CYCLE, FAINT, GREEN, VERMILION
from digenrl.report.published import published_curves
from digenrl.report.read_run import Run
from digenrl.report.summary_record import PublishedCurve

WIDTH = 7.2
"""Width of a figure in inches: a full text width in print."""


def running_mean(values: Sequence[float], span: int) -> list[float]:
    """Return a centred running mean of width `span` (odd). It is narrower at the ends, so that end
    values do not shift."""
    half, sums = span // 2, list(accumulate(values, initial=0.0))
    means = []
    for index in range(len(values)):
        reach = min(half, index, len(values) - 1 - index)
        means.append((sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1))
    return means


def draw_line(
    axes: Axes, steps: Sequence[int], values: Sequence[float], label: str, colour: str
) -> None:
    """Draw a curve. From 15 points on, raw values are faint behind a running mean."""
    if len(values) < 15:
        axes.plot(steps, values, color=colour, label=label, marker="o", markersize=3.5)
        return
    axes.plot(steps, values, color=colour, alpha=0.28, linewidth=1.0)
    axes.plot(steps, running_mean(values, max(3, len(values) // 12) | 1), color=colour, label=label)


def draw_level(axes: Axes, level: float, note: str) -> None:
    """Draw a dashed horizontal line with `note` above its right end."""
    axes.axhline(level, color=FAINT, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.annotate(note, (0.99, level), xycoords=("axes fraction", "data"), xytext=(0, 3),
                  textcoords="offset points", ha="right", fontsize=8, color=FAINT)  # fmt: skip


def draw_published(axes: Axes, entry: PublishedCurve) -> None:
    """Draw a published curve as a band between its first and its last value."""
    axes.axhspan(entry["first"], entry["last"], color=FAINT, alpha=0.12, linewidth=0)
    after = "at last" if entry["steps"] is None else f"after {entry['steps']:g} RL steps"
    for level, place in ((entry["first"], "at first"), (entry["last"], after)):
        draw_level(axes, level, f"published, {entry['reward']} {place}")


def finish_axes(axes: Axes, title: str, ylabel: str = "", xlabel: str = "RL step") -> None:
    """Set title, labels, integer steps and a little room at the sides."""
    axes.set_title(title)
    axes.set_ylabel(ylabel)
    axes.set_xlabel(xlabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.margins(x=0.02)
    if xlabel == "RL step" and (left := axes.dataLim.x0) == axes.dataLim.x1:
        axes.set_xlim(left - 1, left + 1)  # one step: its neighbours give the scale


def draw_reward(run: Run) -> Figure | None:
    """Draw the optimised reward (batch mean per RL step; fixed prompts and noise at evaluations)
    and the held-out score."""
    steps, values = run.column("reward")
    eval_steps, heldout = run.column("heldout", "eval")
    fixed_steps, fixed = run.column("reward", "eval")
    if not values and not heldout:
        return None
    parts = [name for name in run.metric_names("reward/") if len(run.column(name)[1]) > 0]
    figure = Figure(figsize=(WIDTH, 3.4 if len(parts) < 2 else 5.6), layout="constrained")
    rows = figure.subplots(1 if len(parts) < 2 else 2, 1, squeeze=False)[:, 0]
    if values:
        draw_line(rows[0], steps, values, "reward, training batch", BLUE)
    if fixed:
        rows[0].plot(fixed_steps, fixed, color=BLUE, marker="D", markersize=5, markerfacecolor="white", linewidth=1.0,  # noqa: E501
                     linestyle=(0, (4, 2)), label="reward, evaluation")  # fmt: skip
    for entry in published_curves(run) or ():
        draw_published(rows[0], entry)
    same_scale = not values or (_in_unit(values) == _in_unit(heldout))
    axes = rows[0] if same_scale else rows[0].twinx()
    if heldout:
        axes.plot(
            eval_steps,
            heldout,
            color=VERMILION,
            marker="D",
            markersize=5,
            label="held-out score, evaluation",
        )
    finish_axes(rows[0], "Reward and held-out score", "mean score")
    if not same_scale:
        axes.grid(False)
        axes.spines["right"].set_visible(True)
        axes.set_ylabel("held-out score")
    handles, labels = rows[0].get_legend_handles_labels()
    if not same_scale:
        more = axes.get_legend_handles_labels()
        handles, labels = handles + more[0], labels + more[1]
    rows[0].legend(handles, labels, loc="best")
    if len(parts) > 1:
        for index, name in enumerate(parts):
            part_steps, part_values = run.column(name)
            draw_line(
                rows[1],
                part_steps,
                part_values,
                name.removeprefix("reward/"),
                CYCLE[index % len(CYCLE)],
            )
        finish_axes(rows[1], "Reward by part", "mean score")
        rows[1].legend(loc="best", ncols=min(3, len(parts)))
    return figure


def _in_unit(values: Sequence[float]) -> bool:
    return all(-1e-6 <= value <= 1 + 1e-6 for value in values)


def draw_policy(run: Run) -> Figure | None:
    """Draw how far the policy moved: KL to the base model, clipped share, |ratio-1|, gradient
    norm."""
    panels = [
        ("kl", "KL to the base model", "KL", False),
        ("clip_fraction", "Clipped cells", "share", False),
        ("ratio_max_dev", "Largest |ratio − 1|", "", True),
        ("grad_norm", "Gradient norm", "", False),
    ]
    panels = [panel for panel in panels if run.column(panel[0])[1]]
    if not panels:
        return None
    rows = (len(panels) + 1) // 2
    figure = Figure(figsize=(WIDTH, 2.35 * rows), layout="constrained")
    grid = figure.subplots(rows, min(2, len(panels)), squeeze=False).flatten()
    for axes, (key, title, label, logarithmic) in zip(grid, panels, strict=False):
        steps, values = run.column(key)
        if key.endswith("max_dev"):
            axes.plot(
                steps, values, color=BLUE, linewidth=1.2
            )  # a maximum: its mean would say nothing
        else:
            draw_line(axes, steps, values, key, BLUE)
        ages = [name for name in run.metric_names(f"{key}/stale_") if any(run.column(name)[1])]
        if key == "clip_fraction" and len(ages) > 1:
            axes.lines[-1].set_label("all")
            for name, colour in zip(ages, CYCLE[1:], strict=False):
                draw_line(
                    axes, *run.column(name), f"{name.rpartition('_')[2]} version(s) old", colour
                )
            axes.legend(loc="best")
        finish_axes(axes, title, label)
        if logarithmic and min(values) > 0 and max(values) > 20 * min(values):
            axes.set_yscale("log")
        elif min(values) >= 0:
            axes.set_ylim(bottom=0)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    return figure


def draw_diversity(run: Run) -> Figure | None:
    """Draw the loss of variety, and how far the policy is from its base model.

    Variety is measured relative to real data or between CLIP features. The distance to real data is
    drawn too.
    """
    panels = [
        ("diversity_ratio", "Within-class diversity / real data", "ratio", GREEN),
        ("nn_distance", "Distance to the nearest real sample", "distance", BLUE),
        ("clip_diversity", "CLIP distance within a prompt", "1 − cosine", GREEN),
        ("clip_kid", "KID to the reference (CLIP)", "MMD²", BLUE),
        ("kl", "KL to the base model", "nats per sample", BLUE),
    ]
    panels = [panel for panel in panels if run.column(panel[0], "eval")[1]]
    if not panels:
        return None
    columns, rows = min(2, len(panels)), -(-len(panels) // 2)
    figure = Figure(
        figsize=(WIDTH * (0.55 if columns == 1 else 1.0), 2.7 * rows), layout="constrained"
    )
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes, (key, title, label, colour) in zip(grid, panels, strict=False):
        steps, values = run.column(key, "eval")
        level, note = (1.0, "real data") if key == "diversity_ratio" else (values[0], "base model")
        draw_level(axes, level, note)
        axes.plot(steps, values, color=colour, marker="o", markersize=4)
        finish_axes(axes, title, label)
        axes.margins(y=0.18)
    return figure


def step_time(run: Run) -> Figure | None:
    """Draw seconds per RL step, measured and predicted by the schedule's own cost model, and
    samples per second."""
    steps, values = run.column("step_s")
    if not values:
        return None
    panels = 1 + bool(run.column("samples_per_s")[1])
    figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
    grid = figure.subplots(1, panels, squeeze=False)[0]
    grid[0].plot(steps, values, color=BLUE, label="measured", linewidth=1.4)
    predicted_steps, predicted = run.column("predicted_step_s")
    if predicted:
        grid[0].plot(
            predicted_steps,
            predicted,
            color=VERMILION,
            linestyle=(0, (4, 2)),
            label="predicted",
            linewidth=1.4,
        )
        grid[0].legend(loc="best")
    finish_axes(grid[0], "Time of one RL step", "seconds")
    grid[0].set_ylim(0, 1.1 * _robust_top([*values, *predicted]))
    if panels == 2:
        steps, rate = run.column("samples_per_s")
        draw_line(grid[1], steps, rate, "samples/s", GREEN)
        finish_axes(grid[1], "Throughput, all ranks", "samples / s")
        grid[1].set_ylim(0, 1.1 * max(rate))
    return figure


def _robust_top(values: Sequence[float]) -> float:
    """Return the largest value, or twice the 95th percentile if a single slow start exceeds all
    others by far."""
    ordered = sorted(values)
    return min(ordered[-1], 2.0 * ordered[int(0.95 * (len(ordered) - 1))])
