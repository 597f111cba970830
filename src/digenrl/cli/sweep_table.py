"""Write the result of a sweep: sweep.csv, sweep.json, and a table for the terminal."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COLUMNS = """
status ranks rl_steps step_s predicted_step_s samples_per_s ratio efficiency reward_first
reward_last heldout_first heldout_last diversity_ratio staleness_max first_ratio_max_dev wall_s
"""
"""Columns after the swept keys: results of `result_of`, and `ratio`, samples_per_s over that of the
first completed job."""
MEANING = """predicted_step_s: the schedule's own model. ratio: samples_per_s over the first job's.
lost: share of the time of all ranks, by cause."""
NOISE = "\nDifferences in time may be noise: few RL steps, or a busy machine."
FEW_STEPS, BUSY = 5, 1.5 * (os.cpu_count() or 1)
"""RL steps below which, and load above which, times differ by chance."""


@dataclass
class SweepJob:
    """One run of a sweep."""

    number: int
    words: tuple[str, ...]
    """All overrides of the job."""
    varied: dict[str, str]
    """Swept keys with this job's values."""
    run_dir: Path
    status: str = "waiting"
    """waiting | running | completed | stopped | failed | refused."""
    cause: str | None = None
    wall_s: float = 0.0
    summary: dict[str, Any] = field(default_factory=dict)
    """Results of the run (`result_of`)."""

    @property
    def log(self) -> Path:
        return self.run_dir.with_suffix(".log")


def result_of(run_dir: Path) -> dict[str, Any]:
    """Return the results that a job wrote; {} if it wrote nothing.

    For a run they are its summary.json. For a plan they are the costs of the configuration, or of
    the planner's best candidate if the configuration leaves the allocation open. `bubble` becomes
    the share of all ranks' time that was lost, by cause.
    """
    summary, plan = run_dir / "summary.json", run_dir / "plan.json"
    if summary.is_file():
        found: dict[str, Any] = json.loads(summary.read_text(encoding="utf-8"))
        world = found.get("world") or {}
        total = sum(world.values()) * (found.get("wall_s") or 0.0)
        lost: dict[str, float] = {}
        for causes in (found.get("bubble") or {}).values():
            for cause, seconds in causes.items():
                lost[cause] = lost.get(cause, 0.0) + seconds / total if total else 0.0
        ranks = f"{world.get('trainer', 0)}+{world.get('rollout', 0)}" if world else None
        return found | {"bubble": lost, "ranks": ranks}
    if plan.is_file():
        planned = json.loads(plan.read_text(encoding="utf-8"))
        if planned.get("refused"):
            return {"ranks": "refused", "cause": planned["refused"], "status": "completed"}
        row = planned["configured"] or planned["candidates"][0]
        return row | {"ranks": f"{row['trainers']}+{row['rollouts']}", "status": "completed"}
    return {}


def job_rows(jobs: Sequence[SweepJob]) -> list[dict[str, object]]:
    """Return one row per job.

    It has the job's number, the swept keys, `COLUMNS`, the share of lost time by cause, the cause
    of a failure, and the run directory.
    """
    table = []
    speeds = [job.summary.get("samples_per_s") for job in jobs if job.status == "completed"]
    base = next(filter(None, speeds), None)
    for job in jobs:
        row: dict[str, object] = {"job": job.number, **job.varied}
        row.update({key: job.summary.get(key) for key in COLUMNS.split()})
        speed = job.summary.get("samples_per_s")
        row["ratio"] = speed / base if speed and base else None
        row.update(
            {f"lost:{cause}": share for cause, share in (job.summary.get("bubble") or {}).items()}
        )
        row.update(status=job.status, cause=job.cause, run=str(job.run_dir))
        if row["wall_s"] is None:
            row["wall_s"] = round(job.wall_s, 3)
        table.append(row)
    return table


def write_tables(sweep_dir: Path, jobs: Sequence[SweepJob]) -> str:
    """Write sweep.csv and sweep.json; return the table as text."""
    table = job_rows(jobs)
    order = {
        name: (name in ("cause", "run"), name.startswith("lost:")) for row in table for name in row
    }
    names = sorted(order, key=order.__getitem__)
    text = io.StringIO()
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(table)
    (sweep_dir / "sweep.csv").write_text(text.getvalue(), encoding="utf-8")
    (sweep_dir / "sweep.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    return _as_text(table, [name for name in names if name != "run"])


def _as_text(table: Sequence[Mapping[str, object]], names: Sequence[str]) -> str:
    """Return aligned columns. Columns without values are left out, and columns without differences
    are printed once."""
    names = [name for name in names if any(row.get(name) not in (None, "") for row in table)]
    told = ("status", "rl_steps", "ranks", "reward_first", "heldout_first", "first_ratio_max_dev")
    same = [
        n
        for n in names
        if n in told and len(table) > 1 and len({_format_cell(n, row.get(n)) for row in table}) == 1
    ]
    names = [name for name in names if name not in same]
    cells = [list(names), *([_format_cell(name, row.get(name)) for name in names] for row in table)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    if same:
        lines.append(
            "the same in all: "
            + ", ".join(f"{name} {_format_cell(name, table[0][name])}" for name in same)
        )
    if "samples_per_s" in names:
        steps = [row.get("rl_steps") for row in table]
        fewest = min(
            number if isinstance(number, int) and number else FEW_STEPS for number in steps
        )
        lines.append(MEANING + NOISE * (fewest < FEW_STEPS or os.getloadavg()[0] > BUSY))
    return "\n".join(lines)


def _format_cell(name: str, value: object) -> str:
    if value is None:
        return "-"
    if name.startswith("lost:") and isinstance(value, (int, float)):
        return f"{100 * value:.1f}%"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
