"""Time of every rank by stage: a Gantt chart of a few RL steps, and the sums over the whole run."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from digenrl.record.spans import Span
from digenrl.report.page.curves import WIDTH
from digenrl.report.page.style import CAUSE_COLOURS, FAINT, GRID, INK, STAGE_COLOURS
from digenrl.report.read_run import Run, label_of
from digenrl.report.summary import wall_seconds

SHOWN_STEPS = 3
SHOWN_RANKS, NAMED_RANKS = 256, 64
"""Most ranks of a picture, and most that are named. A record may name any number of ranks."""
SHOWN_SPANS = 10_000
"""Most spans to draw if no RL step was finished."""
COLOURS = {stage: colour for stage, colour in STAGE_COLOURS.items() if stage != "wait"} | {
    f"wait {cause}": colour for cause, colour in CAUSE_COLOURS.items()
}
"""Label of a span -> colour; work comes first."""


def colour_of(span: Span) -> str:
    """Return the colour of a span: by stage, or by cause for a wait."""
    return COLOURS[label_of(span)]


def clip_spans(spans: Iterable[Span], start: float, end: float) -> list[Span]:
    """Return the parts of `spans` inside [start, end], for the costs of an RL step or of another
    window."""
    parts = []
    for span in spans:
        first, last = max(span.start, start), min(span.end, end)
        if last > first:
            parts.append(Span(span.rank, span.role, span.stage, first, last, span.step, span.args))
    return parts


def typical_window(
    ends: Mapping[int, float], steps: int = SHOWN_STEPS
) -> tuple[float, float, range]:
    """Return (start, end, RL steps) of up to `steps` consecutive RL steps in the middle of the run.

    Args:
        ends: RL step -> second at which it was finished; at least two consecutive steps.
    """
    known = sorted(ends)
    runs = [known[at : at + steps + 1] for at in range(len(known))]
    # The first of each gives the second at which the others begin. A thinned record has gaps, which
    # no window spans.
    windows = [run for run in runs if len(run) > 1 and run[-1] - run[0] == len(run) - 1]
    longest = max(len(window) for window in windows)
    windows = [window for window in windows if len(window) == longest]
    # Among those, the one whose length is the median: neither the start nor an outlier.
    lengths = [ends[window[-1]] - ends[window[0]] for window in windows]
    middle = median(lengths)
    at = min(
        range(len(windows)),
        key=lambda index: (abs(lengths[index] - middle), abs(index - len(windows) // 2)),
    )
    return ends[windows[at][0]], ends[windows[at][-1]], range(windows[at][1], windows[at][-1] + 1)


def assign_lanes(spans: Sequence[Span]) -> list[int]:
    """Return the lane of each span (sorted by start, longest first). Overlapping spans of a rank
    get different lanes."""
    taken, free, chosen = list[tuple[float, int]](), list[int](), list[int]()
    for span in spans:
        while taken and taken[0][0] <= span.start + 1e-9:
            heapq.heappush(free, heapq.heappop(taken)[1])
        lane = heapq.heappop(free) if free else len(taken)
        heapq.heappush(taken, (span.end, lane))
        chosen.append(lane)
    return chosen


def shown_ranks(ranks: Collection[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the ranks (role, number) that a picture has room for, trainers first."""
    return sorted(ranks, key=lambda key: (key[0] != "trainer", key[1]))[:SHOWN_RANKS]


def _of_all(shown: int, ranks: int) -> str:
    """Return what a title says about ranks that are left out."""
    return f" (the first {shown} of {ranks} ranks)" if shown < ranks else ""


def draw_gantt(axes: Axes, spans: Sequence[Span], start: float, end: float) -> None:
    """Draw one row per rank, trainers first. Concurrent spans of a rank share its row."""
    by_rank: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in clip_spans(spans, start, end):
        by_rank[span.role, span.rank].append(span)
    rows = shown_ranks(by_rank)
    boxes: dict[str, list[list[tuple[float, float]]]] = defaultdict(list)
    for row, key in enumerate(rows):
        own = sorted(by_rank[key], key=lambda span: (span.start, -span.end))
        chosen = assign_lanes(own)
        height = 0.78 / (max(chosen) + 1)
        for span, lane in zip(own, chosen, strict=True):
            left, right, top = span.start - start, span.end - start, row - 0.39 + lane * height
            boxes[colour_of(span)].append(
                [(left, top), (left, top + height), (right, top + height), (right, top)]
            )
    for colour, bars in boxes.items():  # one artist a colour: thousands take seconds
        axes.add_collection(
            PolyCollection(bars, facecolors=colour, edgecolors="white", linewidths=0.3)
        )
    _name_rows(axes, rows)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlim(0, end - start)
    axes.grid(axis="y", visible=False)


def _name_rows(axes: Axes, rows: Sequence[tuple[str, int]]) -> range:
    """Write the names of at most `NAMED_RANKS` rows, and return which."""
    named = range(0, len(rows), 1 + len(rows) // (NAMED_RANKS + 1))
    axes.set_yticks(named, ["{} {}".format(*rows[row]) for row in named])
    return named


def palette_of(labels: Collection[str]) -> dict[str, str]:
    """Return label -> colour for `labels`: work first, then bubbles."""
    return {name: colour for name, colour in COLOURS.items() if name in labels}


def draw_legend(figure: Figure, labels: Collection[str]) -> None:
    """Draw the palette below the axes."""
    handles = [
        Patch(facecolor=colour, label=_readable_label(name))
        for name, colour in palette_of(labels).items()
    ]
    figure.legend(
        handles=handles, loc="outside lower left", ncols=6, handlelength=1.1, columnspacing=1.4
    )


def _readable_label(label: str) -> str:
    """Return the label for people to read."""
    stage, _, cause = label.partition(" ")
    return f"{stage}: {cause.replace('_', ' ')}" if cause else stage


def draw_timeline(run: Run) -> Figure | None:
    """Draw a Gantt chart of a few typical RL steps. Lost time has a warm colour by cause."""
    if any(step + 1 in run.step_ends for step in run.step_ends):
        start, end, steps = typical_window(run.step_ends)
        which = f"RL step {steps[0] + 1}" + f" to {steps[-1] + 1}" * (len(steps) > 1)
    else:  # one step or none: what there is, in the order of its start
        spans = sorted((span.start, span.end) for span in islice(_of_ranks(run), SHOWN_SPANS))
        if not spans:
            return None
        start, end, steps, which = (
            spans[0][0],
            max(end for _, end in spans),
            range(0),
            "the whole run",
        )
    shown = clip_spans(_of_ranks(run), start, end)
    every = len({(span.role, span.rank) for span in shown})
    ranks = min(every, SHOWN_RANKS)
    figure = Figure(
        figsize=(WIDTH * 1.35, 1.5 + 0.42 * min(ranks, 24) + 0.09 * max(0, ranks - 24)),
        layout="constrained",
    )
    axes = figure.subplots()
    draw_gantt(axes, shown, start, end)
    for step in steps[:-1]:
        axes.axvline(run.step_ends[step] - start, color=INK, linewidth=0.9, linestyle=(0, (2, 2)))
    axes.set_title(f"What each rank did, {which}{_of_all(ranks, every)}")
    axes.set_xlabel(f"seconds after {start:.1f} s of the run (dashed: a version was finished)")
    draw_legend(figure, [label_of(span) for span in shown])
    return figure


def _of_ranks(run: Run) -> Iterator[Span]:
    return (span for span in run.spans if span.role != "launcher")


def time_by_rank(run: Run) -> Figure | None:
    """Draw the seconds of the whole run by rank, split into stages and bubbles."""
    totals = {key: labels for key, labels in run.seconds.items() if key[0] != "launcher"}
    if not totals:
        return None
    rows = shown_ranks(totals)
    figure = Figure(figsize=(WIDTH * 1.35, 1.5 + 0.34 * min(len(rows), 30)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(rows)
    labels = {label for own in totals.values() for label in own}
    for name, colour in palette_of(labels).items():
        widths = [totals[key].get(name, 0.0) for key in rows]
        axes.barh(
            range(len(rows)),
            widths,
            left=left,
            height=0.72,
            color=colour,
            edgecolor="white",
            linewidth=0.3,
        )
        left = [base + width for base, width in zip(left, widths, strict=True)]
    present_s = wall_seconds(run)
    for row in _name_rows(axes, rows):
        own = totals[rows[row]]
        waited = sum(seconds for name, seconds in own.items() if name.startswith("wait"))
        share = 100 * waited / present_s if present_s else 0.0
        axes.text(left[row], row, f"  {share:.0f} % idle", va="center", fontsize=8, color=FAINT)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.09)
    axes.grid(axis="y", visible=False)
    axes.set_title(f"Time by rank, whole run{_of_all(len(rows), len(totals))}")
    axes.set_xlabel("seconds")
    axes.xaxis.grid(color=GRID)
    draw_legend(figure, labels)
    return figure


def save_gantt(spans: Sequence[Span], step_ends: Sequence[float], path: Path) -> None:
    """Draw one bar per rank over the last of some steps, coloured by stage, to the file `path`."""
    start = step_ends[-2] if len(step_ends) > 1 else 0.0
    ranks = len({span.rank for span in spans})
    figure = Figure(figsize=(11, 1.5 + 0.2 * ranks), layout="constrained")
    axes = figure.subplots()
    draw_gantt(axes, spans, start, step_ends[-1])
    axes.set(xlabel="seconds", title="one RL step")
    draw_legend(figure, {label_of(span) for span in clip_spans(spans, start, step_ends[-1])})
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
