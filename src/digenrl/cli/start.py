"""Start a job: its ranks on this machine, or the one rank that a scheduler made of this process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from digenrl import devices, run
from digenrl.cli.announce import announce
from digenrl.cli.attempts import fork
from digenrl.cli.ending import end_alone, stop_grace
from digenrl.cli.job import Job, NotStarted
from digenrl.cluster.attach import Place, attach, check_allocation
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.launcher import RunOutcome
from digenrl.cluster.limits import Limits
from digenrl.cluster.signals import StopSignals
from digenrl.cluster.world import Session, World
from digenrl.config import EXIT_CODE, prepare_run_dir_or_exit
from digenrl.hardware import numbering, parse_hardware


def launch(job: Job, signals: StopSignals) -> tuple[Path, RunOutcome]:
    """Run the job to its end; return the run directory and how the run ended.

    Raises:
        NotStarted: this process is a scheduler's, and its run could not begin.
    """
    if job.place is None:
        return fork(job, signals)
    try:
        return _join(job, job.place, signals)
    except (ValueError, OSError) as error:  # OSError: no port, or no store
        raise NotStarted(error, EXIT_CODE) from error


def _join(job: Job, place: Place, signals: StopSignals) -> tuple[Path, RunOutcome]:
    """Be the rank that torchrun or SLURM started; return as `launch`.

    Raises:
        ValueError: the allocation does not fit the processes that were started, or they share no
            directory.
    """
    config, (trainers, rollouts) = job.composed.config, job.ranks

    def prepare() -> Path:
        signals.count_all()  # what exists from here on is ended in order
        run_dir = prepare_run_dir_or_exit(job.composed)
        announce(job, run_dir, job.checkpoint)
        return run_dir

    def rank_main(world: World, session: Session) -> None:
        if not config.hardware.emulate:
            devices.take(world.local_rank)
            devices.claim(session, world.rank)
        run.fit(config, job.checkpoint, job.advice, world, session)

    check_allocation(place, trainers, rollouts)
    return attach(
        place,
        numbering(parse_hardware(config.hardware), trainers, rollouts),
        trainers,
        prepare,
        rank_main,
        Handshake(**config.handshake),
        Limits(**config.limits),
        job.network,
        end_alone,
        partial(stop_grace, config),
        signals,
        job.credentials,
        job.max_lost,
    )
