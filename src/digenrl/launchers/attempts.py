"""Runs whose ranks this process starts: attempts, each from the newest checkpoint, until one ends
well or they are too many."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

from digenrl import run
from digenrl.cluster.launcher import Launch, Launcher, RunOutcome, launch_ranks
from digenrl.cluster.limits import Limits
from digenrl.cluster.restarts import Restarts
from digenrl.cluster.signals import StopSignals
from digenrl.config import EXIT_CODE, prepare_run_dir_or_exit
from digenrl.config.settings import Settings
from digenrl.launchers.announce import announce_launch
from digenrl.launchers.ending import end_alone, stop_grace
from digenrl.launchers.job import Job, NotStarted, launcher_of, newest_checkpoint
from digenrl.record import run_lock
from digenrl.record.run_dir import METRICS, RESTART, append_event
from digenrl.report.read_run import JsonlTail
from digenrl.rewards import managed
from digenrl.strategy.checkpoint_io import UNFINISHED, CheckpointError, step_of, verify_checkpoint

States = Callable[[], Mapping[int, str]]
"""Returns rank -> its present activity, in a few words."""


class Shown(Protocol):
    """What a user sees of a running run."""

    def poll(self) -> None:
        """Show what is new."""

    def close(self) -> None:
        """Leave the terminal as it was."""


Show = Callable[[Path, int, States], Shown]
"""Makes a display from the run directory, the number of RL steps and the ranks' states."""


def fork_ranks(job: Job, signals: StopSignals, show: Show) -> tuple[Path, RunOutcome]:
    """Start every rank, and show the run until the last one is gone; return the run directory and
    how the run ended.

    When ranks die before the last RL step is saved, the run begins again from the newest
    checkpoint, as long as `Restarts` allows it.
    """
    signals.count_all()  # what exists from here on is ended in order
    run_dir = held_run_dir(job)
    allocation, steps = job.composed.settings.allocation, job.composed.settings.max_rl_steps
    restarts = Restarts(allocation.max_restarts, allocation.restart_pause_s, steps)
    launcher, checkpoint, metrics = (
        launcher_of(job.composed),
        job.checkpoint,
        JsonlTail(run_dir / METRICS),
    )
    metrics.read_new_rows()
    while True:
        announce_launch(job, run_dir, checkpoint)
        try:
            outcome = launch_ranks(
                _attempt_launch(job, launcher, run_dir, checkpoint, signals, show)
            )
        except OSError as error:  # no free port
            return run_dir, RunOutcome("failed", str(error), 1)
        finally:
            managed.remove_shared_folder(os.getpid())
        began = 0 if checkpoint is None else step_of(checkpoint)
        finished = [
            int(row["rl_step"]) for row in metrics.read_new_rows() if row.get("kind") == "step"
        ][-1:] or [began]
        if not outcome.died or signals.count or _is_saved(run_dir, steps):
            return run_dir, outcome
        try:
            checkpoint = _begin_again(run_dir, str(outcome.cause), restarts, began, finished[0])
        except _Over as over:
            outcome.cause = str(over)
            return run_dir, outcome
        if number := _wait_for_signal(restarts.pause_s, signals):
            return run_dir, RunOutcome(
                "stopped", f"signal {number.name}, before it began again", 128 + number
            )


def held_run_dir(job: Job) -> Path:
    """Make the run's directory, take its lock and return its path."""
    run_dir = prepare_run_dir_or_exit(job.composed)
    try:
        run_lock.hold_run(run_dir)
    except run_lock.RunIsHeld as error:
        raise NotStarted(error, EXIT_CODE) from error
    run_lock.say_holder(run_dir)
    return run_dir


class _Over(Exception):
    """A run ends; the text is its cause."""


def _begin_again(
    run_dir: Path, cause: str, restarts: Restarts, began: int, finished: int
) -> Path | None:
    """Return the checkpoint from which a run whose ranks died starts again, after saying so; None:
    the beginning, because no save was ever complete.

    Args:
        began: RL step from which the attempt that died had started.
        finished: last RL step that the attempt finished.

    Raises:
        _Over: the run does not start again.
    """
    if (refusal := restarts.refuse_restart(cause, began, finished)) is not None:
        raise _Over(refusal)
    found = (run_dir / "checkpoints").glob("*step-*")
    saved = any(not path.name.startswith(UNFINISHED) for path in found)
    try:
        checkpoint = newest_checkpoint(run_dir) if saved else None
    except CheckpointError as error:
        raise _Over(f"{cause}; {error}") from error
    facts = {"cause": cause, "rl_step": finished, "checkpoint": checkpoint and checkpoint.name}
    append_event(run_dir, RESTART, facts)
    source = "its beginning" if checkpoint is None else checkpoint.name
    print(
        f"begins again from {source} in {restarts.pause_s:g} s: {cause}",
        file=sys.stderr,
        flush=True,
    )
    return checkpoint


def _attempt_launch(
    job: Job,
    launcher: Launcher,
    run_dir: Path,
    checkpoint: Path | None,
    signals: StopSignals,
    show: Show,
) -> Launch:
    """Return the launch of one attempt, from `checkpoint`."""
    settings = job.composed.settings
    shown = _Shown(partial(show, run_dir, settings.max_rl_steps))
    return Launch(
        *job.ranks,
        launcher.rank_main(partial(run.fit_rank, settings, checkpoint, job.advice)),
        run_dir,
        host=launcher.host,
        places=launcher.places,
        max_lost=job.max_lost,
        patience_s=settings.allocation.patience_s,
        fewest=span["min"] if isinstance(span := settings.allocation.rollouts, dict) else 1,
        credentials=job.credentials,
        limits=Limits(**settings.limits.model_dump()),
        network=job.network,
        stop_grace=partial(stop_grace, settings, run_dir),
        stop_save_s=settings.allocation.stop_save_s,
        signals=signals,
        on_tick=shown.update_display,
        on_end=shown.close_display,
        on_orphaned=partial(_close_orphaned, run_dir, os.getpid(), settings),
    )


def _close_orphaned(run_dir: Path, launcher: int, settings: Settings, cause: str) -> None:
    """Close a run whose launcher was killed, in the monitor's process."""
    end_alone(run_dir, settings, cause)
    managed.remove_shared_folder(launcher)


class _Shown:
    """The display of one attempt."""

    def __init__(self, make: Callable[[States], Shown]) -> None:
        self._make = make
        self._display: Shown | None = None

    def update_display(self, states: States) -> None:
        """Show what is new. The display is made with the first tick, when all ranks are forked."""
        if self._display is None:
            self._display = self._make(states)
        self._display.poll()

    def close_display(self) -> None:
        """Leave the terminal as it was."""
        if self._display is not None:
            self._display.close()


def _is_saved(run_dir: Path, step: int) -> bool:
    """Return whether the run has a whole checkpoint of RL step `step`."""
    try:
        verify_checkpoint(run_dir / "checkpoints" / f"step-{step:06d}")
    except CheckpointError:
        return False
    return True


def _wait_for_signal(seconds: float, signals: StopSignals) -> signal.Signals | None:
    """Wait, and return the signal that ended the wait, if any."""
    deadline = time.monotonic() + seconds
    while not signals.count and time.monotonic() < deadline:
        time.sleep(0.05)
    return signal.Signals(signals.number) if signals.count else None
