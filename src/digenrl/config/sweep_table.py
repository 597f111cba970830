"""The result of a sweep: sweep.csv and sweep.json, a table for the terminal, and a plot."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from digenrl.config.multirun import Job

COLUMNS = (
    "status",
    "rl_steps",
    "step_s",
    "predicted_step_s",
    "samples_per_s",
    "reward_first",
    "reward_last",
    "heldout_first",
    "heldout_last",
    "diversity_ratio",
    "staleness_max",
    "first_ratio_max_dev",
    "wall_s",
)
"""Keys of summary.json that become columns, after the swept keys."""
_PLOTTED = ("step_s", "samples_per_s", "heldout_last", "reward_last")


def rows(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """One row a job: its number, the swept keys, `COLUMNS`, the cause of a failure, and its run directory."""
    table = []
    for job in jobs:
        row: dict[str, Any] = {"job": job.number, **job.varied}
        row.update({key: job.summary.get(key) for key in COLUMNS})
        bubbles = job.summary.get("bubble") or {}
        row["bubble_s"] = round(sum(seconds for causes in bubbles.values() for seconds in causes.values()), 3)
        row.update(status=job.status, cause=job.cause, run=str(job.run_dir))
        if row["wall_s"] is None:
            row["wall_s"] = round(job.wall_s, 3)
        table.append(row)
    return table


def write_tables(sweep_dir: Path, jobs: Sequence[Job], plot: bool) -> str:
    """Write sweep.csv, sweep.json and, where asked for, sweep.png; returns the table as text."""
    table = rows(jobs)
    names = list(dict.fromkeys(name for row in table for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(table)
    (sweep_dir / "sweep.csv").write_text(text.getvalue(), encoding="utf-8")
    (sweep_dir / "sweep.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    if plot:
        _plot(sweep_dir / "sweep.png", jobs)
    return _as_text(table, [name for name in names if name != "run"])


def _as_text(table: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Aligned columns; columns without any value are left out."""
    names = [name for name in names if any(row.get(name) not in (None, "") for row in table)]
    cells = [list(names), *([_cell(row.get(name)) for name in names] for row in table)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _plot(path: Path, jobs: Sequence[Job]) -> None:
    """One bar chart for each figure that at least one job reported."""
    shown = [key for key in _PLOTTED if any(isinstance(job.summary.get(key), (int, float)) for job in jobs)]
    if not shown:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = [", ".join(f"{key.rsplit('.', 1)[-1]}={value}" for key, value in job.varied.items()) for job in jobs]
    size = (4.2 * len(shown), 1.2 + 0.35 * len(jobs))
    figure, axes = pyplot.subplots(1, len(shown), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axis, key in zip(axes[0], shown, strict=True):
        axis.barh(range(len(jobs)), [job.summary.get(key) or 0.0 for job in jobs], color="#4477aa")
        axis.set_yticks(range(len(jobs)), labels)
        axis.set_xlabel(key)
    axes[0][0].invert_yaxis()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
