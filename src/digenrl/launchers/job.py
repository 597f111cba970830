"""A run that is ready to start: settled, checked, and with the checkpoint that it continues
from."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from digenrl import devices, parts
from digenrl.advisor import Advice, Advisor
from digenrl.cluster.launcher import Launcher, RankMain, check_open_files
from digenrl.cluster.network import Network
from digenrl.config import EXIT_CODE, Composed, ConfigError
from digenrl.config.commands import to_continue
from digenrl.config.stored import compare_ties
from digenrl.launchers.agreement import check_machine, facts_of
from digenrl.launchers.missing import explain_refusal
from digenrl.launchers.on_ray import RayLauncher
from digenrl.launchers.places import Place, place_of
from digenrl.record import run_lock
from digenrl.rewards.needs import require_weights
from digenrl.settle import begins_with, settle_run
from digenrl.strategy.checkpoint_io import (
    CheckpointError,
    newest_valid,
    step_of,
    ties_of,
    verify_checkpoint,
)


@dataclass(frozen=True)
class Job:
    """What is going to run, and where."""

    composed: Composed
    """Settled: no value is `auto`."""
    advice: Advice
    """What every rank is told."""
    place: Place | None
    """What a scheduler gave this process, which is one rank; None: this process starts the
    ranks."""
    checkpoint: Path | None
    """Directory that a resumed run continues from; None for a new run."""
    memory: tuple[str, ...] = ()
    """What each role's rank will hold, in words; () where nobody knows."""

    @property
    def ranks(self) -> tuple[int, int]:
        """(trainers, rollouts) that the run begins with."""
        return begins_with(self.composed.settings)

    @property
    def reports(self) -> bool:
        """Whether this process writes the report."""
        return self.place is None or self.place.rank == 0

    @property
    def network(self) -> Network:
        """The `network` group."""
        return Network(
            self.composed.settings.network.interface, self.composed.settings.network.ports
        )

    @property
    def max_lost(self) -> int | None:
        """Rollouts that may die; None: all."""
        settings = self.composed.settings
        if settings.schedule.claims == "split":  # nobody may claim the part of a rank that died
            return 0
        most = settings.allocation.max_lost_rollouts
        return None if most == "auto" else int(most)

    @property
    def credentials(self) -> dict[str, object]:
        """What a rollout that joins compares itself with (`ProcessFacts`); {}: none can join."""
        settings = self.composed.settings
        if not settings.allocation.rollouts or settings.schedule.claims == "split":
            return {}
        return asdict(facts_of(settings))


class NotStarted(Exception):
    """Nothing was started. The text says why; `run_dir` is the run that is complete already."""

    def __init__(self, cause: object, exit_code: int, run_dir: Path | None = None) -> None:
        super().__init__(cause)
        self.exit_code, self.run_dir = exit_code, run_dir

    def print_cause(self) -> int:
        """Print the cause, and the complete run as the last line of standard output; return the
        exit code."""
        print(self, file=sys.stderr)
        if self.run_dir is not None:
            print(self.run_dir)
        return self.exit_code


def prepare_job(composed: Composed, advisor: Advisor) -> Job:
    """Return the job of a configuration.

    Raises:
        NotStarted: the run is complete, has no whole checkpoint, lacks weights, or cannot run as
            configured.
    """
    asked, settings = composed, composed.settings
    try:
        place = find_place()
        if composed.resumed and (place is None or place.rank == 0):
            run_lock.hold_run(composed.run_dir)
    except (ValueError, OSError) as error:
        raise NotStarted(error, EXIT_CODE) from error
    checkpoint = _find_checkpoint(composed, verifies=place is None or place.rank == 0)
    try:
        require_weights(
            {} if settings.hardware.emulate else settings.node_at("reward"), settings.callbacks
        )
        composed = settle_run(composed, advisor, None if place is None else place.size)
        parts.check_parts(composed.settings)
        check_place(composed, place)
        check_open_files(most_ranks(composed))
        ranks = begins_with(composed.settings)
        advice = advisor.advise_ranks(composed, *ranks)
        memory = advisor.memory_lines(composed, *ranks)
    except (ValueError, OSError) as error:
        said = explain_refusal(asked, advisor, error, local=place is None)
        raise NotStarted(said, EXIT_CODE) from error
    return Job(composed, advice, place, checkpoint, tuple(memory))


def find_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return the position that torchrun or SLURM gave this process; None without a scheduler.

    Raises:
        ValueError: as `place_of`.
    """
    # srun sets SLURM_STEP_NUM_TASKS; the batch script itself has SLURM_NTASKS.
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if "TORCHELASTIC_RUN_ID" not in environment and tasks < 2:
        return None
    return place_of(environment)


def _find_checkpoint(composed: Composed, verifies: bool) -> Path | None:
    """Return the checkpoint that a resumed run continues from; None for a new run.

    Args:
        verifies: whether this process reads every file of the checkpoint. One process of a job
            does. The others take the newest by its name, and learn from that process which
            checkpoint is whole.

    Raises:
        NotStarted: the run is complete, or has no whole checkpoint.
    """
    if not composed.resumed:
        return None
    try:
        checkpoint = newest_checkpoint(composed.run_dir, verifies)
    except CheckpointError as error:
        raise NotStarted(error, 1) from error
    problems, notes = (
        ([], [])
        if not verifies
        else compare_ties(composed.run_dir, ties_of(checkpoint), composed.overrides)
    )
    if problems:
        raise NotStarted(ConfigError(problems), EXIT_CODE)
    for note in notes:
        print(note, file=sys.stderr)
    step = step_of(checkpoint)
    if step < composed.settings.max_rl_steps:
        return checkpoint
    words = (f"max_rl_steps={2 * step}",)
    again = to_continue(composed.run_dir, *words, given=composed.settings.as_plain())
    said = (
        f"{composed.run_dir} is complete at RL step {step}; nothing was started or written. To go "
        f"on, raise max_rl_steps: {again}"
    )
    raise NotStarted(said, 0, composed.run_dir)


def newest_checkpoint(run_dir: Path, verifies: bool = True) -> Path:
    """Return the newest whole checkpoint; damaged ones are named on standard error. Without
    `verifies`, return the newest one by its name.

    Raises:
        CheckpointError: there is none.
    """
    say = partial(print, file=sys.stderr)
    return newest_valid(run_dir / "checkpoints", say, verify_checkpoint if verifies else str)


def most_ranks(composed: Composed) -> int:
    """Return the most ranks of a settled run."""
    return sum(composed.settings.allocation.split)


def launcher_of(composed: Composed) -> Launcher:
    """Return what gives ranks their places where no scheduler did."""
    return (
        RayLauncher(composed.settings)
        if composed.settings.launch == "ray"
        else ThisMachine(composed)
    )


class ThisMachine:
    """The `Launcher` whose ranks are forked here; rank r has GPU r."""

    host = "127.0.0.1"
    places = None

    def __init__(self, composed: Composed) -> None:
        self._composed = composed

    @property
    def ranks_here(self) -> int:
        return most_ranks(self._composed)

    def check_devices(self) -> None:
        settings = self._composed.settings
        devices.check_own_gpus(settings, sum(begins_with(settings)))

    def rank_main(self, fit: RankMain) -> RankMain:
        return fit


def check_place(composed: Composed, place: Place | None) -> None:
    """Check the run's GPUs, network interface and ports on this machine. Refuse the run
    if any is missing.

    Args:
        place: the scheduler's numbers for this process; None without a scheduler.

    Raises:
        ValueError: as `Launcher.check_devices`, `Place.check_run`, `Network.check_listeners`,
        `check_machine`.
    """
    if place is None:
        launcher = launcher_of(composed)
        launcher.check_devices()
        here = launcher.ranks_here
    else:
        place.check_run(composed.settings)
        here = place.local_size
    asked = composed.settings.network
    Network(asked.interface, asked.ports).check_listeners(1 + here)
    gpus = devices.uses_gpus(composed.settings)
    check_machine(here, gpus, alone=place is None or place.size == place.local_size)
