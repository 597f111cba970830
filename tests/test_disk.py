"""A disk that fills up, a directory that disappears: real commands on a real file system of a few
megabytes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from digenrl import config
from digenrl.cluster.launcher import RunOutcome
from digenrl.launchers.ending import report_end
from digenrl.report.page import plots
from digenrl.report.read_run import read_run
from tests.report.synthetic import write_run
from tests.training import PATIENCE_S, SMALL, Train

pytestmark = pytest.mark.processes

RUN = (*SMALL, "schedule=gap", "allocation.trainers=1", "allocation.rollouts=1")
AT_ONCE = "callbacks.checkpoint.retry_s=0"
"""A last checkpoint that fails is not tried again."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB in memory."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", path], capture_output=True
    ).returncode:
        pytest.skip("mounting a file system needs root")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def fill(disk: Path) -> Path:
    """Take what is free, to the last page."""
    path = disk / "filler"
    with path.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
    return path


def when(train: Train, happened: Any) -> None:
    """Wait until `happened()`; the command may have ended by then."""
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline, train.stderr
        if train.poll() is not None:
            assert happened(), train.stderr
        time.sleep(0.02)


def run_of(disk: Path) -> Path:
    return next(disk.glob("*/*/config.yaml")).parent


def steps_of(disk: Path) -> int:
    with suppress(StopIteration):
        return (
            (run_of(disk) / "metrics.jsonl").read_bytes().count(b"\n")
            if list(disk.glob("*/*/metrics.jsonl"))
            else 0
        )
    return 0


def failed(disk: Path) -> bool:
    return "checkpoint_failed" in (run_of(disk) / "events.jsonl").read_text()


def left_behind(run_dir: Path) -> list[str]:
    found = [str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if "tmp" in path.name]
    return [*found, *(path.name for path in run_dir.glob(".reserve"))]


def test_a_full_disk_ends_the_run_with_the_cause_and_the_way_on(running: Any, disk: Path) -> None:
    train = running(*RUN, AT_ONCE, f"output_root={disk}", "max_rl_steps=200", fork=True)
    when(train, lambda: steps_of(disk) >= 2)
    filler = fill(disk)
    assert train.finish() == 75
    run_dir = run_of(disk)
    told = " ".join(train.stderr.split())
    assert "could not be written to" in told
    assert re.search(
        r"No space left on device \(\d\.\d MiB free\); the newest whole one is step-\d+", told
    )
    assert f"to continue: digenrl resume {run_dir}" in told
    assert "Traceback" not in train.stderr
    assert train.stdout.splitlines()[-1] == str(run_dir)
    assert not left_behind(run_dir)
    run = read_run(run_dir)
    assert run.events[-1]["kind"] == "end", "the reserve had no room for the end of the run"
    assert run.events[-1]["status"] == "stopped"
    assert "step-" in run.events[-1]["cause"]
    assert (run_dir / "summary.json").exists()
    filler.unlink()
    done = int((run_dir / "checkpoints" / "last").resolve().name.removeprefix("step-"))
    again = running(f"resume={run_dir}", f"max_rl_steps={done + 2}", tiny=(), fork=True)
    assert again.finish() == 0, again.stderr
    assert (run_dir / "checkpoints" / f"step-{done + 2:06d}").exists()


@pytest.mark.slow
def test_the_last_checkpoint_waits_for_room(running: Any, disk: Path) -> None:
    """Nothing was saved before, so a run that gave up at once would lose all its steps."""
    words = ("max_rl_steps=2", "callbacks.checkpoint.every=1000")
    train = running(*RUN, f"output_root={disk}", *words, fork=True)
    when(train, lambda: steps_of(disk) >= 1)
    filler = fill(disk)
    when(train, lambda: failed(disk))
    filler.unlink()
    assert train.finish() == 0, train.stderr
    assert (run_of(disk) / "checkpoints" / "last").resolve().name == "step-000002"
    assert not left_behind(run_of(disk))
    assert "could not be written" in train.stdout + train.stderr


@pytest.mark.slow
def test_a_run_may_go_on_over_a_full_disk_and_saves_when_there_is_room(
    running: Any, disk: Path
) -> None:
    train = running(
        *RUN,
        f"output_root={disk}",
        "max_rl_steps=30",
        "callbacks.checkpoint.on_error=continue",
        fork=True,
    )
    when(train, lambda: steps_of(disk) >= 2)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline or (train.poll() is None and not failed(disk)):
        filler = fill(disk)  # again and again: a checkpoint that fails gives back what it had taken
        time.sleep(0.1)
    assert train.poll() is None, train.stderr
    assert failed(disk)
    filler.unlink()
    assert train.finish() == 0, train.stderr
    run_dir = run_of(disk)
    assert (run_dir / "checkpoints" / "last").resolve().name == "step-000030"
    assert not left_behind(run_dir)
    assert "Traceback" not in train.stderr
    assert "could not be written" in train.stdout + train.stderr
    summary = read_run(run_dir)
    lost = sum(
        event["lines"]
        for event in summary.events_of("unwritten")
        if event["file"] == "metrics.jsonl"
    )
    assert len(summary.steps) + lost == 30, "the gap was not counted"


@pytest.mark.slow
def test_a_disk_without_room_for_a_first_checkpoint(running: Any, disk: Path) -> None:
    filler = fill(disk)
    os.truncate(filler, filler.stat().st_size - (200 << 10))
    train = running(*RUN, AT_ONCE, f"output_root={disk}", "max_rl_steps=200", fork=True)
    assert train.finish() != 0
    assert "Traceback" not in train.stderr
    assert "there is no older one" in " ".join(train.stderr.split())
    assert "to continue" not in train.stderr
    assert not left_behind(run_of(disk))


@pytest.mark.slow
def test_a_logger_whose_directory_disappears_ends_nothing(running: Any) -> None:
    train = running(*RUN, "max_rl_steps=10", "logger=tensorboard", fork=True)
    train.wait_for_step(2)
    shutil.rmtree(train.run_dir / "tensorboard")
    assert train.finish() == 0, train.stderr
    assert train.summary["status"] == "completed"
    assert train.summary["rl_steps"] == 10
    assert train.summary["loggers"]["tensorboard"] >= 1


def test_the_end_of_a_run_on_a_read_only_disk_is_told(
    disk: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "PICTURES", {})
    run_dir = write_run(disk / "run", steps=2, ended=False, samples=False)
    before = sorted(run_dir.rglob("*"))
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    report_end(run_dir, RunOutcome("stopped", "signal SIGTERM", 143), config.load([]).settings)
    told = " ".join(capfd.readouterr().err.split())
    assert "digits_flowgrpo: stopped" in told
    assert "Stopped: signal SIGTERM." in told
    assert "events.jsonl could not take the end of the run" in told
    for name in ("summary.json", "trace.json", "report.html"):
        assert f"{name} could not be made: Read-only file system" in told
    assert "Traceback" not in told
    assert sorted(run_dir.rglob("*")) == before
