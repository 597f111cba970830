"""Signals that stop a run, to the launcher, to a rank and to the process group, from import to
report."""

from __future__ import annotations

import os
import pty
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from digenrl.cluster.signals import LEAVES
from digenrl.cluster.timers import BEAT_EVERY_S
from digenrl.config import EXIT_CODE
from digenrl.strategy.checkpoint_io import newest_valid
from tests.storm import STOPS, storm
from tests.training import PATIENCE_S, SMALL, Train, fault, state_of

pytestmark = pytest.mark.processes

ENDLESS = (*SMALL, "max_rl_steps=1000", "callbacks.checkpoint.every=1000")


def wait_until(reached: Callable[[], object], train: Train) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert train.poll() is None, f"ended early: {train.stderr}"
        assert time.monotonic() < deadline, train.stderr
        time.sleep(0.02)


def assert_stopped(train: Train, number: signal.Signals) -> int:
    """Assert that the run ended as asked, with its last version saved, and return its RL steps."""
    assert train.finish() == 128 + number, train.stderr
    summary = train.summary
    assert (summary["status"], summary["cause"]) == ("stopped", f"signal {number.name}")
    assert newest_valid(train.run_dir / "checkpoints").name == f"step-{summary['rl_steps']:06d}"
    assert (train.run_dir / "report.html").stat().st_size > 0
    assert train.stdout.splitlines()[-1] == str(train.run_dir)
    assert f"to continue: digenrl resume {train.run_dir}" in train.stderr
    assert "Traceback" not in train.stderr
    return int(summary["rl_steps"])


@pytest.mark.parametrize(
    ("number", "target"),
    [
        pytest.param(
            number, target, id=f"{number.name}-{target}", marks=() if chosen else pytest.mark.slow
        )
        for number in STOPS
        for target in ("launcher", "rank", "group")
        for chosen in [(number, target) == (signal.SIGTERM, "group")]
    ],
)
def test_a_stop_finishes_the_step_saves_and_reports(
    running: Any, number: signal.Signals, target: str
) -> None:
    """One more signal, during the report, changes nothing."""
    train = running(*ENDLESS, fork=True)
    train.wait_for_step(2)
    ranks = train.ranks()
    if target == "group":
        os.killpg(train.pid, number)
    else:
        rank = (
            ranks[0] if number in LEAVES else ranks[-1]
        )  # a rollout that gets one of these leaves alone
        os.kill(train.pid if target == "launcher" else rank.pid, number)
    wait_until(lambda: any(row["kind"] == "end" for row in train.rows("events.jsonl")), train)
    os.killpg(train.pid, number)
    assert assert_stopped(train, number) >= 2
    assert all(state_of(process.pid) == "gone" for process in ranks)


def test_a_pause_of_a_rank_of_the_group_or_of_the_launcher_is_harmless(running: Any) -> None:
    """Ctrl-Z and `fg`, or a debugger that attaches: no rank is given up, and signals are obeyed
    afterwards."""
    train = running(*ENDLESS, fork=True)
    train.wait_for_step(1)
    ranks = train.ranks()
    pauses = {
        "trainer": partial(os.kill, ranks[0].pid),
        "rollout": partial(os.kill, ranks[-1].pid),
        "launcher": partial(os.kill, train.pid),
        "group": partial(os.killpg, train.pid),
        "group again": partial(os.killpg, train.pid),
    }
    for name, send in pauses.items():
        send(signal.SIGSTOP)
        time.sleep(BEAT_EVERY_S + 0.1)  # longer than the heartbeat's wait for a signal
        send(signal.SIGCONT)
        time.sleep(0.3)
        assert train.ranks() == ranks, f"{name}: {train.stderr}"
    os.kill(ranks[0].pid, signal.SIGTERM)
    assert_stopped(train, signal.SIGTERM)
    assert (train.summary["lost"], train.summary["restarted"]) == ([], [])


def test_a_step_that_does_not_end_is_given_up_and_the_version_before_it_is_saved(
    running: Any,
) -> None:
    """The second signal; a rollout hangs in its scorer, so the trainers never get what they wait
    for."""
    train = running(*ENDLESS, *fault("reward", 1, "hang", call=11), fork=True)
    train.wait_for_step(2)
    os.killpg(train.pid, signal.SIGTERM)
    time.sleep(1.5)
    assert train.poll() is None
    os.killpg(train.pid, signal.SIGTERM)
    assert_stopped(train, signal.SIGTERM)


@pytest.mark.slow
def test_the_third_signal_ends_a_run_that_cannot_save(running: Any) -> None:
    train = running(*ENDLESS, *fault("accumulate", 0, "hang", call=30), fork=True)
    train.wait_for_step(1)
    time.sleep(2.0)
    for _ in range(3):
        os.kill(train.pid, signal.SIGINT)
        time.sleep(1.1)
    assert train.finish() == 128 + signal.SIGINT
    assert "the trainers had not saved when they were killed" in train.summary["cause"]


def test_a_signal_while_nothing_runs_ends_the_command(running: Any) -> None:
    train = running(*SMALL)
    wait_until(lambda: _handles(train.pid, signal.SIGTERM), train)
    os.killpg(train.pid, signal.SIGTERM)
    assert train.finish() == 128 + signal.SIGTERM
    assert train.stderr == "stopped by SIGTERM; no rank was running\n"
    assert not (train.root / "outputs").exists()


@pytest.mark.slow
def test_a_signal_during_the_report_leaves_a_report(running: Any) -> None:
    train = running(*SMALL)
    wait_until(lambda: any(row["kind"] == "end" for row in train.rows("events.jsonl")), train)
    os.killpg(train.pid, signal.SIGTERM)
    assert train.finish() == 128 + signal.SIGTERM
    assert train.summary["status"] == "completed"
    assert (train.run_dir / "report.html").stat().st_size > 0
    assert train.stdout.splitlines()[-1] == str(train.run_dir)


@pytest.mark.slow
def test_a_closed_terminal_loses_nothing(running: Any, tmp_path: Path) -> None:
    """The kernel sends SIGHUP, and every later write fails."""
    inside, terminal = pty.openpty()
    train = running(*ENDLESS, terminal=terminal)
    os.close(terminal)
    train.wait_for_step(2)
    os.close(inside)
    assert train.finish() == 128 + signal.SIGHUP
    summary = train.summary
    assert (summary["status"], summary["cause"]) == ("stopped", "signal SIGHUP")
    assert newest_valid(train.run_dir / "checkpoints").name == f"step-{summary['rl_steps']:06d}"
    assert (train.run_dir / "report.html").stat().st_size > 0


@pytest.mark.slow
def test_under_nohup_a_closed_terminal_changes_nothing(running: Any) -> None:
    train = running(*SMALL, "max_rl_steps=20", wrapper=["nohup"])
    train.wait_for_step(1)
    os.killpg(train.pid, signal.SIGHUP)
    assert train.finish() == 0, train.stderr


def test_too_few_open_files_are_refused_with_the_number_that_is_needed(running: Any) -> None:
    train = running(*SMALL, wrapper=["sh", "-c", 'ulimit -n 80; exec "$@"', "sh"])
    assert train.finish() == EXIT_CODE, train.stderr
    assert "need 216 open files in a process, and this machine allows 80" in train.stderr
    assert "ulimit -n 216" in train.stderr
    assert not (train.root / "outputs").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_few_random_signals(tmp_path: Path) -> None:
    ends, wrong = storm(tmp_path, 1, "a few", 1, ("apart",))
    assert not wrong, "\n".join(wrong)
    assert sum(ends.values()) == 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_random_signals(tmp_path: Path) -> None:
    ends, wrong = storm(tmp_path, 200, seed="all", resume_every=2)
    assert not wrong, "\n".join(wrong)
    assert sum(ends.values()) == 200


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["pause", "death", "exit"])
def test_random_mishaps(tmp_path: Path, kind: str) -> None:
    ends, wrong = storm(tmp_path, 40, "all", 1, kinds=(kind,))
    assert not wrong, "\n".join(wrong)
    assert sum(ends.values()) == 40


def _handles(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (number - 1) & 1)
