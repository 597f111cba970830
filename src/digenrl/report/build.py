"""Make all files of a report from a run directory in one call: summary.json, trace.json, pictures,
report.html.

Each file is made by itself. A failure, for example on a full disk, becomes a warning and does not
affect other files.
"""

from __future__ import annotations

import os

from digenrl.record.run_dir import (
    END,
    EVENTS,
    SUMMARY,
    TRACE,
    append_event,
    free_space,
    release_reserve,
    tell_unwritten,
    write_json,
    write_trace,
)
from digenrl.record.spans import perfetto_events
from digenrl.report.attempt import make_or_warn
from digenrl.report.read_run import read_run
from digenrl.report.summary import build_summary
from digenrl.report.summary_record import Summary


def finish_report(
    run_dir: str | os.PathLike[str], status: str, cause: str | None = None
) -> Summary:
    """Call `record_end`, then `rebuild_report`. The launcher does this once, when all ranks are
    gone.

    Args:
        run_dir: the run's directory.
        status: completed | stopped | failed.
        cause: why the run stopped or failed; None for a completed run.

    Raises:
        ValueError: `status` is another word.
    """
    summary = record_end(run_dir, status, cause)
    rebuilt = rebuild_report(run_dir)
    # Where events.jsonl took no end, the files alone cannot tell how the run ended.
    warnings = list(dict.fromkeys([*rebuilt["warnings"], *summary["warnings"]]))
    return {**rebuilt, "status": status, "cause": cause, "warnings": warnings}


def record_end(run_dir: str | os.PathLike[str], status: str, cause: str | None = None) -> Summary:
    """Record a run's end in events.jsonl, and write summary.json: the files that a run always
    leaves. Return the summary, with a warning if writing failed.

    Args, Raises: see `finish_report`.
    """
    if status not in ("completed", "stopped", "failed"):
        raise ValueError(f"status = {status!r}: use completed, stopped or failed.")
    release_reserve(run_dir)
    tell_unwritten(run_dir)
    warnings: list[str] = []
    if not append_event(run_dir, END, {"status": status, "cause": cause}, urgent=True):
        warnings.append(
            f"{EVENTS} could not take the end of the run ({free_space(run_dir)}): its record has "
            "gaps"
        )
    run = read_run(run_dir)
    summary: Summary = {**build_summary(run, warnings), "status": status, "cause": cause}
    make_or_warn(SUMMARY, lambda: write_json(run.path / SUMMARY, summary), summary["warnings"])
    return summary


def rebuild_report(run_dir: str | os.PathLike[str]) -> Summary:
    """Write summary.json, trace.json, the pictures and report.html from the run's files alone;
    return the summary.

    A file that cannot be made is named in the summary's `warnings`. The others are still written.

    Raises:
        FileNotFoundError: `run_dir` is not a run directory.
    """
    run = read_run(run_dir)
    # First without pictures, so that a summary exists whatever happens to the drawing.
    summary = build_summary(run)
    known, warnings = len(summary["warnings"]), summary["warnings"]
    make_or_warn(SUMMARY, lambda: write_json(run.path / SUMMARY, summary), warnings)
    make_or_warn(TRACE, lambda: write_trace(run.path / TRACE, perfetto_events(run.spans)), warnings)
    from digenrl.report.page.draw import draw_report  # matplotlib: not before ranks are forked

    draw_report(run, summary, warnings)
    if len(warnings) > known:
        make_or_warn(SUMMARY, lambda: write_json(run.path / SUMMARY, summary), [])
    return summary
