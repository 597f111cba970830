"""Train: compose and check the configuration, start the ranks, watch them, report.

    python -m digenrl.cli.train experiment=digits_flowgrpo [hardware=...] [key=value ...] [resume=RUN] [-m]

The ranks run `digenrl.run.build(...).fit()`. The last line on standard output is the run directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from digenrl import config as configuration
from digenrl.config import Composed


def main(words: list[str]) -> int:
    """Run once (or, with -m, once per combination); returns the exit code."""
    if any(word in ("-m", "--multirun") for word in words):
        from digenrl.config.multirun import sweep

        return sweep(words)
    composed = configuration.load_or_exit(words)
    run_dir = configuration.prepare_run_dir_or_exit(composed)
    for note in composed.notes:
        print(note, file=sys.stderr)
    code = train(composed, run_dir)
    print(run_dir)
    return code


def train(composed: Composed, run_dir: Path) -> int:
    """Start every rank, show the run, and write its report; returns the exit code."""
    # Several ranks share the cores: one thread each, and none that spins while it waits. Read when torch loads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from digenrl import run  # torch and Lightning load here, once, before the ranks are forked
    from rich.console import Console

    from digenrl.display import Display, final_table
    from digenrl.report.build import finish
    from digenrl.report.run_dir import LAUNCH, append_event
    from digenrl.strategy.checkpoint import newest_valid
    from digenrl.strategy.launcher import Launch, launch
    from digenrl.strategy.world import Session, World

    settings = composed.config
    trainers, rollouts = run.allocation(settings)
    checkpoint = newest_valid(run_dir / "checkpoints") if composed.resumed else None
    world = {"trainer": trainers, "rollout": rollouts}
    append_event(run_dir, LAUNCH, {"world": world, "overrides": list(composed.overrides)})
    print("\n".join(run.describe(settings, trainers, rollouts, run_dir, checkpoint)), file=sys.stderr)
    display: Display | None = None

    def rank_main(place: World, session: Session) -> None:
        run.build(settings, place, session).fit(checkpoint)

    def tick(states: Callable[[], dict[int, str]]) -> None:
        nonlocal display
        display = display or Display(run_dir, settings.max_rl_steps, states)
        display.poll()

    def end() -> None:
        if display is not None:
            display.close()

    outcome = launch(Launch(rank_main, trainers, rollouts, run_dir, on_tick=tick, on_end=end))
    summary = finish(run_dir, outcome.status, outcome.cause, world)
    Console(stderr=True).print(final_table(summary))
    if outcome.status != "completed":
        print(f"{outcome.status}: {outcome.cause}\nto continue: make resume RUN={run_dir}", file=sys.stderr)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
