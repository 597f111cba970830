"""Everything that is made from a run directory, in one call: summary.json, trace.json, pictures, report.html."""

from __future__ import annotations

import os
from typing import Any

from digenrl.record.run_dir import END, REPORT, SUMMARY, TRACE, append_event, write_json
from digenrl.record.spans import perfetto
from digenrl.report.html import render
from digenrl.report.plots import draw_all
from digenrl.report.read_run import read_run
from digenrl.report.summary import build_summary


def finish(run_dir: str | os.PathLike[str], status: str, cause: str | None = None) -> dict[str, Any]:
    """`close` a run, then `rebuild` what is made from its files. The launcher calls it once, when all ranks are gone.

    Args:
        run_dir: the run's directory.
        status: completed | stopped | failed.
        cause: why it stopped or failed; None when it completed.

    Raises:
        ValueError: another status.
    """
    close(run_dir, status, cause)
    return rebuild(run_dir)


def close(run_dir: str | os.PathLike[str], status: str, cause: str | None = None) -> None:
    """Record a run's end in events.jsonl, and write summary.json: what must be there even if nothing more can be made.

    Args, Raises: see `finish`.
    """
    if status not in ("completed", "stopped", "failed"):
        raise ValueError(f"status = {status!r}: use completed, stopped or failed.")
    append_event(run_dir, END, {"status": status, "cause": cause})
    run = read_run(run_dir)
    write_json(run.path / SUMMARY, build_summary(run))


def rebuild(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Write summary.json, trace.json, the pictures and report.html from the run's files alone; returns the summary.

    A picture that cannot be drawn is named in the summary's `warnings`; the rest is written all the same.

    Raises:
        FileNotFoundError: `run_dir` is not a run directory.
    """
    run = read_run(run_dir)
    # First without pictures, so that a summary exists whatever happens to the drawing.
    summary = build_summary(run)
    write_json(run.path / SUMMARY, summary)
    write_json(run.path / TRACE, perfetto(run.spans), indent=None)
    warnings = draw_all(run)
    if warnings:
        summary = build_summary(run, warnings)
        write_json(run.path / SUMMARY, summary)
    page = run.path / f".{REPORT}.tmp"
    page.write_text(render(run, summary), encoding="utf-8")
    page.replace(run.path / REPORT)
    return summary
