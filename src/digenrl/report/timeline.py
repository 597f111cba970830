"""Where the time of every rank went: a Gantt chart of a few RL steps, and the sums over the whole run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from digenrl.record.spans import Span, clipped
from digenrl.report.curves import WIDTH
from digenrl.report.read_run import Run
from digenrl.report.style import CAUSE_COLOURS, FAINT, GRID, INK, STAGE_COLOURS
from digenrl.report.summary import wall_seconds

SHOWN_STEPS = 3


def colour_of(span: Span) -> str:
    """Colour of a span: by stage, or by cause for a wait."""
    if span.stage == "wait":
        return CAUSE_COLOURS[str(span.args["cause"])]
    return STAGE_COLOURS[span.stage]


def label_of(span: Span) -> str:
    """Legend entry of a span."""
    return f"wait: {str(span.args['cause']).replace('_', ' ')}" if span.stage == "wait" else span.stage


def typical_window(spans: Sequence[Span], steps: int = SHOWN_STEPS) -> tuple[float, float, range]:
    """(start, end, RL steps) of `steps` consecutive RL steps amid the run; of fewer than 2, all (no steps)."""
    ends = step_ends(spans)
    known = sorted(ends)
    if len(known) < 2:
        first, last = min(span.start for span in spans), max(span.end for span in spans)
        return first, last, range(0)
    steps = min(steps, len(known) - 1)
    # Among the windows of that many steps, the one whose length is the median: neither the start nor an outlier.
    lengths = {at: ends[known[at + steps - 1]] - ends[known[at - 1]] for at in range(1, len(known) - steps + 1)}
    middle = median(lengths.values())
    at = min(lengths, key=lambda index: (abs(lengths[index] - middle), abs(index - len(known) // 2)))
    return ends[known[at - 1]], ends[known[at + steps - 1]], range(known[at], known[at + steps - 1] + 1)


def step_ends(spans: Sequence[Span]) -> dict[int, float]:
    """RL step -> second at which the last trainer finished it."""
    ends: dict[int, float] = {}
    for span in spans:
        if span.role == "trainer" and span.step >= 0 and span.stage not in ("generate", "lend", "send", "eval"):
            ends[span.step] = max(ends.get(span.step, 0.0), span.end)
    return ends


def lanes(spans: Sequence[Span]) -> list[int]:
    """Lane of each span (sorted by start, longest first), so that spans which overlap on one rank lie side by side."""
    free: list[float] = []
    chosen = []
    for span in spans:
        lane = next((index for index, end in enumerate(free) if end <= span.start + 1e-9), len(free))
        if lane == len(free):
            free.append(0.0)
        free[lane] = span.end
        chosen.append(lane)
    return chosen


def draw_gantt(axes: Axes, spans: Sequence[Span], start: float, end: float) -> None:
    """One row per rank, trainers first; concurrent spans of a rank share its row."""
    by_rank: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in clipped(spans, start, end):
        by_rank[span.role, span.rank].append(span)
    rows = sorted(by_rank, key=lambda key: (key[0] != "trainer", key[1]))
    for row, key in enumerate(rows):
        own = sorted(by_rank[key], key=lambda span: (span.start, -span.end))
        chosen = lanes(own)
        height = 0.78 / (max(chosen) + 1)
        boxes: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
        for span, lane in zip(own, chosen, strict=True):
            boxes[lane, colour_of(span)].append((span.start - start, span.seconds))
        for (lane, colour), bars in boxes.items():
            bottom = row - 0.39 + lane * height
            axes.broken_barh(bars, (bottom, height), facecolors=colour, edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(len(rows)), [f"{role} {rank}" for role, rank in rows])
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlim(0, end - start)
    axes.grid(axis="y", visible=False)


def palette_of(spans: Sequence[Span]) -> dict[str, str]:
    """Label -> colour of what `spans` hold: work first, then bubbles."""
    present = {label_of(span): colour_of(span) for span in spans}
    order = [*STAGE_COLOURS, *(f"wait: {cause.replace('_', ' ')}" for cause in CAUSE_COLOURS)]
    return {name: present[name] for name in order if name in present}


def draw_legend(figure: Figure, spans: Sequence[Span]) -> None:
    """The palette, below the axes."""
    handles = [Patch(facecolor=colour, label=name) for name, colour in palette_of(spans).items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=6, handlelength=1.1, columnspacing=1.4)


def timeline(run: Run) -> Figure | None:
    """Gantt chart of a few typical RL steps; lost time in warm colours by its cause."""
    spans = [span for span in run.spans if span.role != "launcher"]
    if not spans:
        return None
    start, end, steps = typical_window(spans)
    shown = clipped(spans, start, end)
    ranks = len({(span.role, span.rank) for span in shown})
    figure = Figure(
        figsize=(WIDTH * 1.35, 1.5 + 0.42 * min(ranks, 24) + 0.09 * max(0, ranks - 24)), layout="constrained"
    )
    axes = figure.subplots()
    draw_gantt(axes, spans, start, end)
    for step, boundary in step_ends(spans).items():
        if step in steps[:-1]:
            axes.axvline(boundary - start, color=INK, linewidth=0.9, linestyle=(0, (2, 2)))
    which = "the whole run" if not steps else f"RL step {steps[0] + 1}" + f" to {steps[-1] + 1}" * (len(steps) > 1)
    axes.set_title(f"What each rank did, {which}")
    axes.set_xlabel(f"seconds after {start:.1f} s of the run (dashed: a version was finished)")
    draw_legend(figure, shown)
    return figure


def time_by_rank(run: Run) -> Figure | None:
    """Seconds of the whole run by rank, split into stages and bubbles."""
    spans = [span for span in run.spans if span.role != "launcher"]
    if not spans:
        return None
    totals: dict[tuple[str, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        totals[span.role, span.rank][label_of(span)] += span.seconds
    rows = sorted(totals, key=lambda key: (key[0] != "trainer", key[1]))
    figure = Figure(figsize=(WIDTH * 1.35, 1.5 + 0.34 * min(len(rows), 30)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(rows)
    for name, colour in palette_of(spans).items():
        widths = [totals[key].get(name, 0.0) for key in rows]
        axes.barh(range(len(rows)), widths, left=left, height=0.72, color=colour, edgecolor="white", linewidth=0.3)
        left = [base + width for base, width in zip(left, widths, strict=True)]
    present_s = wall_seconds(run)
    for row, key in enumerate(rows):
        waited = sum(seconds for name, seconds in totals[key].items() if name.startswith("wait"))
        share = 100 * waited / present_s if present_s else 0.0
        axes.text(left[row], row, f"  {share:.0f} % idle", va="center", fontsize=8, color=FAINT)
    axes.set_yticks(range(len(rows)), [f"{role} {rank}" for role, rank in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.09)
    axes.grid(axis="y", visible=False)
    axes.set_title("Time by rank, whole run")
    axes.set_xlabel("seconds")
    axes.xaxis.grid(color=GRID)
    draw_legend(figure, spans)
    return figure
