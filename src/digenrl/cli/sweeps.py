"""Hydra multirun (`-m`) with each job in a fresh process, one after the other, and one table at the
end.

Jobs come from Hydra's own sweep syntax (`seed=0,1,2`, `gap=range(1,4)`, `experiment=glob(wan*)`) on
the command line and from `hydra.sweeper.params` of the experiment. A job that fails leaves a row
with its cause, and the sweep goes on.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from digenrl.cli.sweep_table import SweepJob, result_of, write_tables
from digenrl.cluster.signals import StopSignals, end_with_parent
from digenrl.config.compose import VERSION_BASE, compose_words, initialize_config_dir
from digenrl.config.errors import ConfigError
from digenrl.config.help_pages import configuration_help
from digenrl.config.loading import EXIT_CODE, SWEEP_FLAGS, load, without_flags
from digenrl.config.shipped import config_directory
from digenrl.config.words import format_word, quote_path_word
from digenrl.record.redact import redact_text


def expand_sweep(argv: Sequence[str], config_name: str = "train") -> tuple[Path, list[SweepJob]]:
    """Return the sweep's directory and its jobs, in the order of Hydra's sweeper. Nothing is
    written.

    Raises:
        ConfigError: the words cannot be parsed, or their common part cannot be composed.
    """
    words = [quote_path_word(word) for word in argv if word not in SWEEP_FLAGS]
    single = [word for word in words if not _is_sweep(word)]
    config, problems = compose_words(
        [word for word in single if not word.startswith("resume=")], config_name
    )
    if problems:
        raise ConfigError(problems)
    sweep_dir = Path(str(HydraConfig.get().sweep.dir)).absolute()
    named = {word.partition("=")[0].lstrip("+~") for word in words}
    params = config.hydra.sweeper.get("params") or {}
    words += [f"{key}={value}" for key, value in params.items() if key not in named]
    with initialize_config_dir(str(config_directory()), version_base=VERSION_BASE):
        try:
            parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
            batches = BasicSweeper.split_arguments(
                parser.parse_overrides(words), max_batch_size=None
            )
        except HydraException as error:
            raise ConfigError([redact_text(" ".join(str(error).split()))]) from error
    swept = {word.partition("=")[0] for word in words if _is_sweep(word)}
    jobs = []
    for number, job_words in enumerate(batches[0] if batches else []):
        pairs = [word.partition("=") for word in job_words]
        as_yaml = {"True": "true", "False": "false"}
        varied = {key: as_yaml.get(value, value) for key, _, value in pairs if key in swept}
        jobs.append(SweepJob(number, tuple(job_words), varied, sweep_dir / f"job-{number}"))
    return sweep_dir, jobs


def run_sweep(argv: Sequence[str], config_name: str = "train", module: str = "digenrl") -> int:
    """Run every job of the sweep as `digenrl <config_name>` and return the exit code (0 = every job
    completed).

    Standard output has one line per job, the table, and as the last line the sweep's directory. The
    directory holds a run directory and a log for each job, sweep.csv and sweep.json. The
    files are written before and after every job, so that a killed sweep keeps what it has. `--cfg`
    prints the configuration of every job instead.
    """
    words, asked = without_flags(argv)
    if "--help" in asked:
        print(configuration_help(config_name, None, words))
        return 0
    try:
        sweep_dir, jobs = expand_sweep(words, config_name)
        _refuse_bad(jobs, config_name)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_CODE
    if "--cfg" in asked:
        return _print_configurations(jobs, config_name)
    sweep_dir.mkdir(parents=True, exist_ok=True)
    with _Signals() as stop:
        for job in jobs:
            if job.status == "waiting":
                print(
                    f"[{job.number + 1}/{len(jobs)}] {_job_label(job)}: log {job.log}",
                    file=sys.stderr,
                    flush=True,
                )
                job.status = "running"
                write_tables(sweep_dir, jobs)
                _run_job(job, [module, config_name], stop)
            print(
                f"[{job.number + 1}/{len(jobs)}] {_job_label(job)}: {job.status} "
                f"in {job.wall_s:.0f} s" + (f" ({job.cause})" if job.cause else ""),
                flush=True,
            )
            write_tables(sweep_dir, jobs)
            if stop.number:
                break
        print(write_tables(sweep_dir, jobs))
    print(sweep_dir)
    return stop.exit_code or int(any(job.status != "completed" for job in jobs))


class _Signals(StopSignals):
    """Stop signals that also stop the job in progress, and end the sweep after it."""

    process: subprocess.Popen[bytes] | None = None
    """Process of the job in progress."""

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        super()._handle_signal(number, frame)
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


def _print_configurations(jobs: Sequence[SweepJob], config_name: str) -> int:
    """Print every job's composed configuration."""
    for job in jobs:
        print(f"# job {job.number}: {_job_label(job)}")
        print(
            f"# {job.cause}"
            if job.status == "refused"
            else OmegaConf.to_yaml(load(job.words, config_name).settings.tree)
        )
    return 0


def _is_sweep(word: str) -> bool:
    try:
        return bool(OverridesParser.create().parse_override(word).is_sweep_override())
    except HydraException:
        return False  # reported when all words are parsed


def _job_label(job: SweepJob) -> str:
    return " ".join(f"{key}={value}" for key, value in job.varied.items()) or "the only job"


def _refuse_bad(jobs: Sequence[SweepJob], config_name: str) -> None:
    """Mark the jobs whose configuration is wrong; raise if that is all of them."""
    problems: list[str] = []
    for job in jobs:
        try:
            load(job.words, config_name)
        except ConfigError as error:
            job.status, job.cause = "refused", "; ".join(error.problems)
            problems += error.problems
    if all(job.status == "refused" for job in jobs):
        raise ConfigError(
            problems or ["the sweep has no job: give several values, e.g. seed=0,1,2"]
        )


def _run_job(job: SweepJob, program: Sequence[str], stop: _Signals) -> None:
    """Run one job to its end and fill in its result."""
    command = [
        sys.executable,
        "-m",
        *program,
        *job.words,
        format_word("hydra.run.dir", job.run_dir),
    ]
    began = time.monotonic()
    with job.log.open("wb") as log:
        # In a group of its own: Ctrl-C reaches it through `stop` alone, once.
        stop.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )
        code = stop.process.wait()
    job.wall_s = time.monotonic() - began
    job.summary = result_of(job.run_dir)
    job.status = str(job.summary.get("status", "failed"))
    job.cause = job.summary.get("cause")
    if code != 0 and job.status in ("completed", "unfinished"):
        job.status = "failed"
    if job.status == "failed" and not job.cause:
        job.cause = f"exit code {code}: {_last_line(job.log)}"


def _last_line(log: Path) -> str:
    lines = [
        line.strip()
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    return redact_text(lines[-1]) if lines else "no output"
