"""Train: compose and check the configuration, start the ranks, watch them, report.

    python -m digenrl.cli.train experiment=digits_flowgrpo [hardware=...] [key=value ...] [resume=RUN] [-m]

The ranks run `digenrl.run.build(...).fit()`. The last line on standard output is the run directory. Under torchrun or
SLURM this process is one rank already, and starts none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from digenrl import config as configuration
from digenrl.config import Composed
from digenrl.config.multirun import is_multirun, sweep

if TYPE_CHECKING:
    from digenrl.cluster.attach import Place
    from digenrl.cluster.world import Session, World
    from digenrl.models.emulated import Durations


def main(words: list[str]) -> int:
    """Run once (or, with -m, once per combination); returns the exit code."""
    if is_multirun(words):
        return sweep(words)
    composed = configuration.load_or_exit(words)
    # Several ranks share the cores: one thread each, and none that spins while it waits. Read when torch loads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from digenrl import run  # torch and Lightning load here, once, before the ranks are forked
    from digenrl.cluster.attach import find_place
    from digenrl.preflight import allocated
    from digenrl.strategy.checkpoint_io import CheckpointError

    place = find_place()
    try:
        composed = allocated(composed, None if place is None else place.size)
        run.check(composed.config)
        ranks = composed.config.allocation.trainers + composed.config.allocation.rollouts
        run.check_devices(composed.config, ranks if place is None else place.local_size)
    except ValueError as error:
        print(error, file=sys.stderr)
        return configuration.EXIT_CODE
    if place is not None:
        return join(composed, place)
    run_dir = configuration.prepare_run_dir_or_exit(composed)
    try:
        code = train(composed, run_dir)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    print(run_dir)
    return code


def train(composed: Composed, run_dir: Path) -> int:
    """Start every rank, show the run, and write its report; returns the exit code."""
    from digenrl import run
    from digenrl.cluster.launcher import Launch, Outcome, launch
    from digenrl.display import Display

    settings = composed.config
    trainers, rollouts = settings.allocation.trainers, settings.allocation.rollouts
    announce(composed, run_dir)
    display: Display | None = None

    def tick(states: Callable[[], dict[int, str]]) -> None:
        nonlocal display
        display = display or Display(run_dir, settings.max_rl_steps, states)
        display.poll()

    def end() -> None:
        if display is not None:
            display.close()

    rank_main = partial(run.fit, settings, newest(composed, run_dir), sleeps(composed, trainers, rollouts))

    def orphaned(cause: str) -> None:
        from digenrl.report.build import close

        close(run_dir, "failed", cause, {"trainer": trainers, "rollout": rollouts})
        print(run_dir, flush=True)
        say_end(run_dir, "failed", cause)

    most = settings.allocation.max_lost_rollouts
    if settings.schedule.claims == "split":  # nobody may claim the part of a rank that died
        most = 0
    plan = Launch(
        rank_main,
        trainers,
        rollouts,
        run_dir,
        max_lost=None if most == "auto" else most,
        on_tick=tick,
        on_end=end,
        on_orphaned=orphaned,
    )
    try:
        outcome = launch(plan)
    except OSError as error:  # no free port
        outcome = Outcome("failed", str(error), 1)
    conclude(run_dir, outcome.status, outcome.cause, trainers, rollouts)
    return outcome.exit_code


def join(composed: Composed, place: Place) -> int:
    """Be the rank that torchrun or SLURM started; returns the exit code. Process 0 also reports."""
    from digenrl import run
    from digenrl.cluster.attach import attach, check_allocation
    from digenrl.simulate.hardware import numbering, parse_hardware

    settings = composed.config
    trainers, rollouts = settings.allocation.trainers, settings.allocation.rollouts

    def prepare() -> Path:
        run_dir = configuration.prepare_run_dir_or_exit(composed)
        announce(composed, run_dir)
        return run_dir

    def rank_main(world: World, session: Session) -> None:
        run.fit(settings, newest(composed, session.run_dir), sleeps(composed, trainers, rollouts), world, session)

    try:
        check_allocation(place, trainers, rollouts)
        ranks = numbering(parse_hardware(settings.hardware), trainers, rollouts)
        run_dir, outcome = attach(place, ranks, trainers, prepare, rank_main)
    except ValueError as error:
        print(error, file=sys.stderr)
        return configuration.EXIT_CODE
    if place.rank == 0:
        conclude(run_dir, outcome.status, outcome.cause, trainers, rollouts)
        print(run_dir)
    return outcome.exit_code


def sleeps(composed: Composed, trainers: int, rollouts: int) -> Sequence[Durations]:
    """How long every rank's network sleeps under hardware.emulate; () when the networks are real."""
    if not composed.config.hardware.emulate:
        return ()
    from digenrl.emulate import durations

    return durations(composed, trainers, rollouts)


def newest(composed: Composed, run_dir: Path) -> Path | None:
    """The checkpoint that a resumed run continues from."""
    from digenrl.strategy.checkpoint_io import newest_valid

    return newest_valid(run_dir / "checkpoints") if composed.resumed else None


def announce(composed: Composed, run_dir: Path) -> None:
    """Record the launch, and say what is going to run."""
    from digenrl import run
    from digenrl.preflight import memory_lines
    from digenrl.record.run_dir import LAUNCH, append_event

    trainers, rollouts = composed.config.allocation.trainers, composed.config.allocation.rollouts
    world = {"trainer": trainers, "rollout": rollouts}
    append_event(run_dir, LAUNCH, {"world": world, "overrides": list(composed.overrides)})
    lines = run.describe(composed.config, trainers, rollouts, run_dir, newest(composed, run_dir))
    print("\n".join([*composed.notes, *lines, *memory_lines(composed, trainers, rollouts)]), file=sys.stderr)


def conclude(run_dir: Path, status: str, cause: str | None, trainers: int, rollouts: int) -> None:
    """Write summary, trace, pictures and report, and show the end of the run."""
    from rich.console import Console

    from digenrl.display import final_table
    from digenrl.report.build import finish

    cause = None if cause is None else configuration.redact_text(cause)
    summary = finish(run_dir, status, cause, {"trainer": trainers, "rollout": rollouts})
    Console(stderr=True).print(final_table(summary))
    for loss in summary["lost"]:
        print(f"went on without a rank: {loss}", file=sys.stderr)
    if status != "completed":
        say_end(run_dir, status, cause)


def say_end(run_dir: Path, status: str, cause: str | None) -> None:
    """Say why a run ended early, and the way on where there is one."""
    print(f"{status}: {cause}", file=sys.stderr, flush=True)
    if any((run_dir / "checkpoints").glob("step-*")):
        print(f"to continue: make resume RUN={run_dir}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # before the launcher took the signals over, or after it gave them back
        print("interrupted; no rank was running", file=sys.stderr)
        sys.exit(130)
