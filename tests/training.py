"""A train command in progress, as tests watch it: its files, its processes, and how it must end
when it fails."""

from __future__ import annotations

import fcntl
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from _pytest.logging import LogCaptureHandler

from digenrl import config as configuration
from tests.conftest import ROOT
from tests.strategy.faults import InjectedError
from tests.strategy.processes import TINY

GONE_WITHIN_S = 10.0
"""Every process of a failed run."""
PATIENCE_S = 200.0
"""For a whole run on a machine that does other things too."""
SMALL = ("data.prompts_per_batch=2", "sampling.steps=3", "callbacks.checkpoint.every=1")


@dataclass
class Train:
    """A train command in progress."""

    pid: int
    root: Path
    poll: Callable[[], int | None]
    """The exit code, or None while it runs."""

    @property
    def run_dir(self) -> Path:
        return next(iter(self.root.glob("outputs/*/*")))

    @property
    def stdout(self) -> str:
        return (self.root / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.root / "stderr").read_text()

    def ranks(self) -> list[psutil.Process]:
        """The ranks that the command has forked, in their order: each writes into a log of its
        own."""
        try:
            logs = {_output(child): child for child in psutil.Process(self.pid).children()}
        except psutil.NoSuchProcess:
            return []
        return [logs[log] for log in sorted(logs) if Path(log).match("logs/rank-*.log")]

    def left(self) -> list[int]:
        """Processes of the command that are still there: itself, its ranks, its monitor, whatever
        those started."""
        return [
            pid for pid in psutil.pids() if _session(pid) == self.pid and state_of(pid) != "gone"
        ]

    def rows(self, name: str) -> list[dict[str, Any]]:
        files = list(self.root.glob(f"outputs/*/*/{name}"))
        return (
            [json.loads(line) for line in files[0].read_text().splitlines() if line.endswith("}")]
            if files
            else []
        )

    def wait_for_step(self, step: int) -> None:
        """Wait until `step` RL steps are finished."""
        deadline = time.monotonic() + PATIENCE_S
        while not any(
            row["kind"] == "step" and row["rl_step"] >= step for row in self.rows("metrics.jsonl")
        ):
            assert self.poll() is None, f"ended early: {self.stderr}"
            assert time.monotonic() < deadline, f"no step {step}: {self.stderr}"
            time.sleep(0.05)

    def finish(self) -> int:
        """The exit code, when it has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while (code := self.poll()) is None:
            assert time.monotonic() < deadline, f"hangs: {self.stderr}"
            time.sleep(0.02)
        return code

    @property
    def summary(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return loaded


def start_command(
    root: Path, words: Sequence[str], wrapper: Sequence[str] = (), terminal: int | None = None
) -> Train:
    """`python -m digenrl.cli.train WORDS`, from nothing, with `root` as its working directory; run
    by the command `wrapper`, and with a pseudo-terminal as its own."""
    root.mkdir()
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    with (root / "stdout").open("w") as out, (root / "stderr").open("w") as err:
        process = subprocess.Popen(
            [*wrapper, sys.executable, "-m", "digenrl.cli.train", *words],
            cwd=root, stdout=out if terminal is None else terminal, stderr=err if terminal is None else terminal,
            env=environment, text=True, start_new_session=True,
            preexec_fn=None if terminal is None else lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 0),
        )  # fmt: skip
    return Train(process.pid, root, process.poll)


def fork_command(root: Path, words: Sequence[str], command: str = "train") -> Train:
    """The same, or another command, in a fork of the test's process, which has imported everything;
    without pictures. SIGALRM makes it or a rank raise."""
    root.mkdir()
    process = fork_main([command, *words], root, root / "stdout", root / "stderr")
    assert process.pid is not None
    return Train(process.pid, root, lambda: process.exitcode)


def fork_main(
    words: Sequence[str],
    directory: Path,
    out: Path,
    err: Path,
    environment: Mapping[str, str] | None = None,
    closed: Sequence[int] = (),
) -> BaseProcess:
    """Fork the test's process into `digenrl WORDS`, in a session of its own. That takes a fifth of
    the processor time of a command from nothing, which imports for seven seconds.

    Args:
        environment: all its variables; None: the test's.
        closed: of its standard streams 0, 1 and 2, those that it begins without, as after `>&-`.
    """
    with suppress(configuration.ConfigError):  # which the command says
        # What Hydra composes here, and which targets there are, is known in every later fork.
        configuration.load([word for word in words[1:] if not word.startswith("-")])
    # what is imported is 600,000 objects: no fork should look through them, which copies their
    # pages
    gc.collect()
    gc.freeze()
    process = multiprocessing.get_context("fork").Process(
        target=_main, args=(list(words), directory, out, err, environment, closed)
    )
    process.start()
    return process


def _main(
    words: list[str],
    directory: Path,
    out: Path,
    err: Path,
    environment: Mapping[str, str] | None,
    closed: Sequence[int],
) -> None:
    from digenrl.cli.main import main
    from digenrl.report.page.plots import PICTURES

    PICTURES.clear()  # drawing takes seconds
    # In a test every record is kept, torch's DEBUG records of each save too: .2 MiB an RL step.
    LogCaptureHandler.emit = lambda *_: None  # type: ignore[method-assign]
    os.setsid()
    os.chdir(directory)
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    for descriptor, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if descriptor in closed:  # so Python finds and names it
            os.close(descriptor)
            setattr(sys, name, None)
            setattr(sys, f"__{name}__", None)
    signal.signal(signal.SIGALRM, _raise)
    os._exit(main(words))


def _raise(number: int, frame: FrameType | None) -> None:
    raise InjectedError("injected fault")


def commands(tmp_path: Path) -> Iterator[Callable[..., Train]]:
    """Starts train commands (`fork=True`: forked), and leaves none behind."""
    started: list[Train] = []

    def start(*words: str, tiny: Sequence[str] = TINY, fork: bool = False, **how: Any) -> Train:
        begin = fork_command if fork else start_command
        started.append(begin(tmp_path / str(len(started)), [*tiny, *words], **how))
        return started[-1]

    yield start
    for train in started:
        if train.poll() is None:
            for pid in train.left():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            train.finish()


def fault(
    point: str, rank: int, action: str, name: str = "fault", **more: str | int | float
) -> list[str]:
    """Words that order a fault (see tests.strategy.faults)."""
    settings = {
        "_target_": "tests.strategy.faults.Fault",
        "point": point,
        "rank": rank,
        "action": action,
    }
    settings |= more
    inside = ",".join(f"{key}:{value}" for key, value in settings.items())
    return ["allow_targets=[tests]", f"+callbacks.{name}={{{inside}}}"]


def watch(train: Train) -> float:
    """Wait for the end of the command, and assert that no process is left. Return the seconds from
    the first sign of trouble (a process gone or suspended) to the disappearance of the last
    process."""
    limit = time.monotonic() + PATIENCE_S
    ranks: dict[int, psutil.Process] = {}
    first_gone, last_seen = None, 0.0
    while train.poll() is None:
        assert time.monotonic() < limit, f"hangs: {train.stderr}"
        ranks |= {process.pid: process for process in train.ranks()}
        states = [state_of(pid) for pid in ranks]
        if first_gone is None and any(
            state in ("gone", "stopped") for state in (*states, state_of(train.pid))
        ):
            first_gone = time.monotonic()
        if any(state != "gone" for state in states):
            last_seen = time.monotonic()
        time.sleep(0.05)
    while left := train.left():
        last_seen = time.monotonic()
        assert last_seen < limit, f"left behind: {left}"
        time.sleep(0.02)
    return max(0.0, last_seen - (first_gone or last_seen))


def assert_failed(train: Train, cause: str, within: float = GONE_WITHIN_S) -> None:
    """The command fails, `within` seconds of the first sign of trouble, names the cause and the way
    on, and nothing of it is left."""
    seconds = watch(train)
    assert seconds < within, f"it took {seconds:.1f} s: {train.stderr}"
    assert train.finish() != 0
    assert train.summary["status"] == "failed"
    assert cause in train.summary["cause"], f"{train.summary['cause']!r} instead of {cause!r}"
    assert f"failed: {train.summary['cause']}" in train.stderr
    saved = any(train.run_dir.glob("checkpoints/step-*"))
    assert (f"to continue: digenrl resume {train.run_dir}" in train.stderr) == saved
    assert train.stdout.splitlines()[-1] == str(train.run_dir)
    assert "Traceback" not in train.stderr


def _output(process: psutil.Process) -> str:
    """The file that a process has as its standard output; "" for one that is gone."""
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1")
    except OSError:
        return ""


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def state_of(pid: int) -> str:
    """gone (a zombie too), stopped, or another state of the process."""
    try:
        state = str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"
    return "gone" if state == "zombie" else state
