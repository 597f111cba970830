"""Train: compose and check the configuration, start the ranks, watch them, report.

    digenrl train experiment=digits_flowgrpo [hardware=...] [key=value ...]

    -m                sweep: key=a,b runs every combination, each in a fresh process
    --config-dir DIR  further options of groups, in DIR/experiment/, DIR/reward/ and so on
    --cfg             print the composed configuration and stop
    resume=RUN        continue the run in that directory; of a complete run it says so, with exit code 0

The ranks run `digenrl.run.build_rank(...).fit()`. Standard output is the run directory alone.
Under torchrun or SLURM this process is one rank already, and starts none.
"""  # noqa: E501

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the working directory, which `-m` puts ahead of what is installed
import os

from digenrl.cluster.signals import StopSignals, ignore_closed_terminal
from digenrl.garbage import no_garbage


def main(words: list[str]) -> int:
    """Run once (or, with -m, once per combination); return the exit code, 128 + n after signal
    n."""
    with StopSignals() as signals:  # nothing else is imported before signals are taken
        signals.leave_after(0, 2, "stopped by {signal}; no rank was running")
        ignore_closed_terminal()
        from digenrl.config.loading import is_multirun

        if is_multirun(words):
            from digenrl.cli.sweeps import run_sweep

            return run_sweep(words)
        return train_run(words, signals)


def train_run(words: list[str], signals: StopSignals) -> int:
    """Compose, settle, launch, report; return the exit code."""
    from digenrl.config import load_or_exit

    composed = load_or_exit(words, doc=__doc__)
    before_forks()
    # torch and Lightning load here, once, before the ranks are forked.
    with no_garbage():
        from digenrl.cli.extensions import choose_advisor
        from digenrl.cli.terminal import Display
        from digenrl.launchers import ending, job, start
        from digenrl.record import run_lock

    try:
        prepared = job.prepare_job(composed, choose_advisor())
        run_dir, outcome = start.launch_job(prepared, signals, Display)
    except job.NotStarted as refusal:
        run_lock.release_run(composed.run_dir)
        return refusal.print_cause()
    if prepared.reports:
        # The report is finished, unless it is asked for twice.
        signals.leave_after(1, 1, str(run_dir))
        ending.report_end(run_dir, outcome, prepared.composed.settings)
        print(run_dir, flush=True)
    if prepared.place is not None and outcome.status == "failed":
        # This process was a rank. Its process groups are still open, and their destructors may wait
        # for peers for ever.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(outcome.exit_code)
    return outcome.exit_code or signals.exit_code


def before_forks() -> None:
    """Prepare this process, in which torch has not loaded yet, for the ranks that it forks."""
    # Several ranks share the cores: one thread each, and none that spins while it waits. Read when
    # torch loads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Generation and training alternate shapes on one GPU; ranks are forked, so that no question may
    # initialise the driver here.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # peft imports it wherever it is installed, and its import initialises the driver.
    sys.modules.setdefault("bitsandbytes", None)  # type: ignore[arg-type]


if __name__ == "__main__":
    from digenrl.cli.own_modules import find_own_modules
    from digenrl.cli.streams import guard_streams

    guard_streams()
    find_own_modules(sys.argv[1:])
    sys.exit(main(sys.argv[1:]))
