"""Train: compose and check the configuration, start the ranks, watch them, report.

    python -m digenrl.cli.train experiment=digits_flowgrpo [hardware=...] [key=value ...]

    -m          sweep: key=a,b runs every combination, each in a fresh process
    --cfg       print the composed configuration and stop
    resume=RUN  continue the run in that directory

The ranks run `digenrl.run.build(...).fit()`. The last line on standard output is the run directory. Under torchrun or
SLURM this process is one rank already, and starts none.
"""

from __future__ import annotations

import os
import sys

from digenrl import config as configuration
from digenrl.config.multirun import is_multirun, sweep


def main(words: list[str]) -> int:
    """Run once (or, with -m, once per combination); returns the exit code."""
    if is_multirun(words):
        return sweep(words)
    composed = configuration.load_or_exit(words, doc=__doc__)
    # Several ranks share the cores: one thread each, and none that spins while it waits. Read when torch loads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from digenrl import run  # torch and Lightning load here, once, before the ranks are forked
    from digenrl.cli import start
    from digenrl.cluster.attach import find_place
    from digenrl.preflight import allocated
    from digenrl.strategy.checkpoint_io import CheckpointError

    place = find_place()  # of this process, where a scheduler started it
    try:
        composed = allocated(composed, None if place is None else place.size)  # settle: `auto` becomes numbers
        run.check(composed.config)
        start.check_devices(composed, place)
        joined = None if place is None else start.join(composed, place)  # be one of the ranks
    except ValueError as error:
        print(error, file=sys.stderr)
        return configuration.EXIT_CODE
    try:
        run_dir, outcome = joined or start.fork(composed)  # start the ranks and watch them
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    if place is None or place.rank == 0:
        start.report(run_dir, outcome)
        print(run_dir)
    return outcome.exit_code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # before the launcher took the signals over, or after it gave them back
        print("interrupted; no rank was running", file=sys.stderr)
        sys.exit(130)
