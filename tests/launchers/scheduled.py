"""Processes as torchrun and SLURM start them, for tests of runs under a scheduler."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import ROOT
from tests.strategy.processes import TINY
from tests.training import fork_main

SCRIPTS = ROOT / "scripts"


STEP = {
    "SLURM_NTASKS": "12",
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "login1,gpu[03-04]-ib",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_STEP_NODELIST": "gpu[03-04]-ib",
    "SLURM_STEP_TASKS_PER_NODE": "8,4",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "MASTER_PORT": "23456",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _unscheduled() -> dict[str, str]:
    """Return this process's environment without the variables of a scheduler."""
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM_", "TORCHELASTIC"))
    }


class Forked:
    """A fork of the test's process, with the interface of a `Popen`."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked command", timeout or 0.0)
        return self._process.exitcode


class Processes:
    """Processes of a test, each in a session of its own; all of them are gone afterwards."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._started: list[subprocess.Popen[bytes] | Forked] = []

    def start(self, command: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        number = len(self._started)
        with (
            (self._logs / f"{number}.out").open("wb") as out,
            (self._logs / f"{number}.err").open("wb") as err,
        ):
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=err,
                env=_unscheduled() | environment,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def fork(self, words: Sequence[str], **environment: str) -> None:
        """Start `digenrl WORDS` as `start` does, as a fork of the test's process."""
        number = len(self._started)
        out, err = (self._logs / f"{number}.{stream}" for stream in ("out", "err"))
        self._started.append(
            Forked(fork_main(words, Path.cwd(), out, err, _unscheduled() | environment))
        )

    def codes(self, seconds: float = 600.0) -> list[int]:
        return [process.wait(timeout=seconds) for process in self._started]

    def said(self, number: int = 0, stream: str = "out") -> str:
        return (self._logs / f"{number}.{stream}").read_text()

    def tails(self) -> str:
        files = sorted(self._logs.glob("*.err"))
        return "\n".join(f"== {file.name}\n{file.read_text()[-2500:]}" for file in files)

    def kill(self) -> None:
        for process in self._started:
            if process.poll() is None:
                workers = psutil.Process(process.pid).children(
                    recursive=True
                )  # torchrun's are in other sessions
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                for worker in workers:
                    with suppress(psutil.NoSuchProcess):
                        worker.kill()


def words(tmp_path: Path, trainers: int, rollouts: int, *more: str) -> list[str]:
    allocation = (f"allocation.trainers={trainers}", f"allocation.rollouts={rollouts}")
    return [*TINY, *allocation, f"output_root={tmp_path / 'outputs'}", *more]


def summary(processes: Processes) -> dict[str, Any]:
    """Return the summary of the run whose directory process 0 prints last (under either agent)."""
    lines = [*processes.said(0).splitlines(), *processes.said(1).splitlines()]
    assert lines, processes.tails()
    return json.loads((Path(lines[-1]) / "summary.json").read_text())


def agent(
    tmp_path: Path,
    processes: Processes,
    *prefix: str,
    more: Sequence[str] = ("parallel.sharding=fsdp",),
    **settings: str,
) -> subprocess.Popen[bytes]:
    """Start scripts/torchrun.sh: one of two agents, each with two processes."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [*prefix, "bash", str(SCRIPTS / "torchrun.sh"), *words(tmp_path, 2, 2, *more)]
    own = {"NODES": "2", "RANKS": "2", "RUN_ID": tmp_path.name, "PATH": path}
    return processes.start(command, **(own | settings))


def wait_for_a_step(tmp_path: Path) -> None:
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline and not list(tmp_path.glob("outputs/*/*/metrics.jsonl")):
        time.sleep(0.2)


def srun(
    processes: Processes,
    command: Sequence[str],
    tasks: int,
    more: Sequence[Sequence[str]] = (),
    order: Sequence[int] = (),
    pause_s: float = 0.0,
    fork: bool = False,
) -> None:
    """Start tasks as `srun --ntasks` does on one node.

    Args:
        more: further words of each task.
        order: order in which they start; (): by their numbers.
        pause_s: seconds between two starts.
        fork: whether `command` has the words of `digenrl`, and each task is a fork of the test.
    """
    port = str(free_port())
    for rank in order or range(tasks):
        time.sleep(pause_s)
        step = {
            "SLURM_STEP_NUM_TASKS": str(tasks),
            "SLURM_STEP_TASKS_PER_NODE": str(tasks),
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NODEID": "0",
        }
        begin = processes.fork if fork else processes.start
        begin([*command, *(more[rank] if more else ())], **(STEP | step | {"MASTER_PORT": port}))
