"""Train: compose and check the configuration, start the ranks, watch them, report.

    digenrl train experiment=digits_flowgrpo [hardware=...] [key=value ...]

    -m                sweep: key=a,b runs every combination, each in a fresh process
    --config-dir DIR  further options of groups, in DIR/experiment/, DIR/reward/ and so on
    --cfg             print the composed configuration and stop
    replay=RUN        train from the trajectories that the run in that directory recorded; nothing is generated
    resume=RUN        continue the run in that directory; of a complete run it says so, with exit code 0

The ranks run `digenrl.run.build(...).fit()`. The last line on standard output is the run directory. Under torchrun or
SLURM this process is one rank already, and starts none.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from digenrl.cluster.signals import StopSignals, outlast_terminal


def main(words: list[str]) -> int:
    """Run once (or, with -m, once per combination); returns the exit code, 128 + n after signal n."""
    with StopSignals() as signals:
        signals.leave_after(0, 2, "stopped by {signal}; no rank was running")
        return _run(words, signals)


def _run(words: list[str], signals: StopSignals) -> int:
    from digenrl import config as configuration  # nothing is imported before signals are taken
    from digenrl.config.multirun import is_multirun, sweep
    from digenrl.rewards.needs import require_weights

    outlast_terminal()
    if is_multirun(words):
        return sweep(words)
    composed = configuration.load_or_exit(words, doc=__doc__)
    try:
        rewards = {} if composed.config.hardware.emulate else composed.config.reward
        require_weights(rewards, composed.config.callbacks)
    except ValueError as error:
        print(error, file=sys.stderr)
        return configuration.EXIT_CODE
    # Several ranks share the cores: one thread each, and none that spins while it waits. Read when torch loads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from digenrl import run  # torch and Lightning load here, once, before the ranks are forked
    from digenrl.cli import start
    from digenrl.cluster.attach import find_place
    from digenrl.cluster.launcher import check_open_files
    from digenrl.record.attempt import ResumeAttempt
    from digenrl.settle import allocated
    from digenrl.strategy.checkpoint_io import CheckpointError, step_of

    try:
        checkpoint = start.checkpoint_of(composed)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    if checkpoint is not None and step_of(checkpoint) >= composed.config.max_rl_steps:
        print(_complete(composed.run_dir, step_of(checkpoint)), file=sys.stderr)
        print(composed.run_dir)
        return 0
    attempt = None if checkpoint is None else ResumeAttempt(composed.run_dir)
    place = find_place()  # of this process, where a scheduler started it
    try:
        composed = allocated(composed, None if place is None else place.size)  # settle: `auto` becomes numbers
        run.check(composed.config)
        start.check_place(composed, place)
        check_open_files(start.ranks(composed))
        # Be one of the ranks, where a scheduler started this process; else start them and watch them.
        joined = None if place is None else start.join(composed, place, checkpoint, attempt, signals)
    except (ValueError, OSError) as error:  # OSError: no port, or no store, for a rank of a scheduler
        print(error, file=sys.stderr)
        return configuration.EXIT_CODE
    run_dir, outcome = joined or start.fork(composed, checkpoint, attempt, signals)
    if place is None or place.rank == 0:
        signals.leave_after(1, 1, str(run_dir))  # the report is finished, unless it is asked for twice
        start.report(run_dir, outcome, attempt)
        print(run_dir, flush=True)
    return outcome.exit_code or signals.exit_code


def _complete(run_dir: Path, step: int) -> str:
    return (
        f"{run_dir} is complete at RL step {step}; nothing was started or written. To go on, raise max_rl_steps: "
        f'make resume RUN={run_dir} ARGS="max_rl_steps={2 * step}", or digenrl resume with these.'
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
