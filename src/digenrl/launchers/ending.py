"""The end of a run: time for the last step, the report, and the message if the run ended early."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from digenrl.cluster.access import ACCESS
from digenrl.cluster.launcher import RunOutcome
from digenrl.config.commands import to_continue
from digenrl.config.settings import Settings
from digenrl.record import run_lock
from digenrl.record.redact import redact_text
from digenrl.record.run_dir import METRICS, event_files
from digenrl.report.build import finish_report, record_end
from digenrl.report.read_run import JsonlTail, is_number
from digenrl.report.tables import final_table

_LONGEST_STEPS, _LEAST_S, _UNKNOWN_STEP_S = 3.0, 5.0, 30.0
"""Values of `allocation.stop_grace_s=auto`: a factor for the longest of the last ten steps, the
least seconds, and the seconds before the first step."""

_SLURM_KILL_WAIT_S, _SLURM_ANNOUNCED_S = 30.0, 600.0
"""SLURM's default KillWait, and the seconds before a job's end at which SLURM's signal announces
that end."""


def stop_grace(settings: Settings, run_dir: Path) -> float:
    """Return the seconds that a stop leaves to the step in progress, and say so on standard
    error."""
    seconds = settings.allocation.stop_grace_s
    if seconds == "auto":
        measured = [
            row["step_s"]
            for row in JsonlTail(run_dir / METRICS).read_new_rows()
            if is_number(row.get("step_s"))
        ]
        wanted = (
            max(_LEAST_S, _LONGEST_STEPS * max(measured[-10:])) if measured else _UNKNOWN_STEP_S
        )
        seconds = min(wanted, _scheduler_limit() / 2)  # the other half is for saving
    print(
        f"stopping after the step in progress, for which there are {seconds:.0f} s; a second "
        "signal gives it up. Finished steps are saved either way.",
        file=sys.stderr,
        flush=True,
    )
    return float(seconds)


def _scheduler_limit() -> float:
    """Return the seconds between a stop signal and the scheduler's SIGKILL; infinity if unknown.

    SLURM signals for two reasons. In the last ten minutes of a job the signal announces its end
    (`--signal`), and the rest of the job is left. Otherwise somebody cancelled the job (`scancel`),
    and KillWait is left.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
    if "SLURM_JOB_ID" in os.environ:
        left = float(os.environ.get("SLURM_JOB_END_TIME", "0")) - time.time()
        return left if _SLURM_KILL_WAIT_S < left < _SLURM_ANNOUNCED_S else _SLURM_KILL_WAIT_S
    return math.inf


def report_end(run_dir: Path, outcome: RunOutcome, settings: Settings) -> None:
    """Write summary, trace, pictures and report, and show the end of the run."""
    if outcome.status == "completed" and (unscored := _unscored_cause(run_dir)) is not None:
        outcome.status, outcome.cause, outcome.exit_code = "failed", unscored, 1
    cause = None if outcome.cause is None else redact_text(outcome.cause)
    summary = finish_report(run_dir, outcome.status, cause)
    Console(stderr=True).print(final_table(summary))
    for cause in summary["restarted"]:
        print(f"began again after: {cause}", file=sys.stderr)
    for loss in summary["lost"]:
        print(f"went on without a rank: {loss}", file=sys.stderr)
    run_lock.release_run(run_dir)
    if outcome.status != "completed":
        _say_end(run_dir, outcome.status, cause, settings)


def _unscored_cause(run_dir: Path) -> str | None:
    """Return why a complete run has learned nothing: no sample of it was ever scored."""
    rows = [
        row for row in JsonlTail(run_dir / METRICS).read_new_rows() if row.get("kind") == "step"
    ]
    if not rows or any(row.get("reward") is not None for row in rows):
        return None
    told = [row for file in event_files(run_dir) for row in JsonlTail(file).read_new_rows()]
    events = [row for row in told if row.get("kind") == "missing"]
    causes = Counter(f"reward `{row.get('reward')}`: {row.get('cause')}" for row in events)
    commonest = "".join(f"; {cause}" for cause, _ in causes.most_common(1))
    return f"no sample of the run has a reward, so nothing was learned{commonest}"


def end_alone(run_dir: Path, settings: Settings, cause: str) -> None:
    """Close a run whose launcher, or process 0, can no longer do so. Its token opens nothing any
    more."""
    with suppress(OSError):
        (run_dir / ACCESS).unlink()
    record_end(run_dir, "failed", cause)
    print(run_dir, flush=True)
    _say_end(run_dir, "failed", cause, settings)


def _say_end(run_dir: Path, status: str, cause: str | None, settings: Settings) -> None:
    """Print why a run ended early, and how to continue if that is possible."""
    print(f"{status}: {cause}", file=sys.stderr, flush=True)
    if any((run_dir / "checkpoints").glob("step-*")):
        print(
            f"to continue: {to_continue(run_dir, given=settings.as_plain())}",
            file=sys.stderr,
            flush=True,
        )
