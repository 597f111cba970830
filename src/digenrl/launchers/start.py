"""Start a job: its ranks on this machine, or the one rank that a scheduler made of this process."""

from __future__ import annotations

from pathlib import Path

from digenrl.cluster.launcher import RunOutcome
from digenrl.cluster.signals import StopSignals
from digenrl.config import EXIT_CODE
from digenrl.launchers.attach import run_attached
from digenrl.launchers.attempts import Show, fork_ranks
from digenrl.launchers.job import Job, NotStarted


def launch_job(job: Job, signals: StopSignals, show: Show) -> tuple[Path, RunOutcome]:
    """Run the job to its end; return the run directory and how the run ended.

    Args:
        show: makes the display of a run whose ranks this process starts.

    Raises:
        NotStarted: this process is a scheduler's, and its run could not begin.
    """
    if job.place is None:
        return fork_ranks(job, signals, show)
    try:
        return run_attached(job.place, job, signals)
    except (ValueError, OSError) as error:  # OSError: no port, or no store
        raise NotStarted(error, EXIT_CODE) from error
