"""Start a job: its ranks on this machine, or the one rank that a scheduler made of this process."""

from __future__ import annotations

from pathlib import Path

from digenrl.cli.attempts import fork
from digenrl.cli.job import Job, NotStarted
from digenrl.cluster.launcher import RunOutcome
from digenrl.cluster.signals import StopSignals
from digenrl.config import EXIT_CODE


def launch(job: Job, signals: StopSignals) -> tuple[Path, RunOutcome]:
    """Run the job to its end; return the run directory and how the run ended.

    Raises:
        NotStarted: this process is a scheduler's, and its run could not begin.
    """
    if job.place is None:
        return fork(job, signals)
    try:
        return job.place.launch(job, signals)
    except (ValueError, OSError) as error:  # OSError: no port, or no store
        raise NotStarted(error, EXIT_CODE) from error
