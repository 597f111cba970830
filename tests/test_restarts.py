"""A run whose trainer dies begins again from its newest checkpoint by itself, and its result is
that of a calm run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from digenrl.cluster.restarts import Restarts
from digenrl.strategy.checkpoint_io import newest_valid
from tests.conftest import ROOT
from tests.training import SMALL, Train, fault, state_of

KEPT = ("env", "RUN=outputs/kept/run", str(ROOT / "scripts" / "keep.sh"))
AGAIN = (*SMALL, "allocation.max_restarts=2", "allocation.restart_pause_s=0.1")


def weights(train: Train) -> bytes:
    return (train.run_dir / "checkpoints/last/policy.safetensors").read_bytes()


def events(train: Train, kind: str) -> list[dict[str, Any]]:
    return [row for row in train.rows("events.jsonl") if row["kind"] == kind]


@pytest.mark.slow  # by default one is killed in its last save; test_resume compares the bits
@pytest.mark.processes
@pytest.mark.parametrize(
    ("every", "words"),
    [
        (2, ("schedule=gap",)),
        (1000, ("allocation.trainers=2",)),
    ],
    ids=["from-a-checkpoint", "from-the-beginning"],
)
def test_a_killed_trainer_costs_time_alone(
    running: Any, every: int, words: tuple[str, ...]
) -> None:
    same = (*AGAIN, *words, f"callbacks.checkpoint.every={every}", "max_rl_steps=6")
    calm, struck = running(*same, fork=True), running(*same, fork=True)
    struck.wait_for_step(3)
    ranks = struck.ranks()
    ranks[0].kill()
    assert struck.finish() == 0, struck.stderr
    assert calm.finish() == 0, calm.stderr
    assert weights(struck) == weights(calm)
    (restart,) = events(struck, "restart")
    begun = [row["time"] for row in (*events(struck, "start"), *events(struck, "resume"))]
    assert max(begun) - restart["time"] < 60
    cause = (
        "rank 0 (trainer) was killed by signal 9 (SIGKILL; sent from outside, not for lack of "
        "memory)"
    )
    summary = struck.summary
    assert (summary["status"], summary["rl_steps"], summary["attempts"]) == ("completed", 6, 2)
    assert (summary["restarts"], summary["restarted"], restart["cause"]) == (1, [cause], cause)
    assert f"began again after: {cause}" in struck.stderr
    assert all(state_of(process.pid) == "gone" for process in ranks)


@pytest.mark.processes
def test_a_trainer_killed_in_the_last_save_begins_again(running: Any) -> None:
    """All steps are finished, and nothing is saved: decided by the steps, the training would be
    lost."""
    slow_save = fault("save", 0, "hang", seconds=1.0)
    train = running(
        *AGAIN, "callbacks.checkpoint.every=1000", "max_rl_steps=2", *slow_save, fork=True
    )
    train.wait_for_step(2)
    while not list(train.run_dir.glob("checkpoints/.tmp-step-000002/")):
        assert train.poll() is None, train.stderr
        time.sleep(0.02)
    train.ranks()[0].kill()
    assert train.finish() == 0, train.stderr
    assert (train.summary["status"], train.summary["rl_steps"], train.summary["restarts"]) == (
        "completed",
        2,
        1,
    )
    (restart,) = events(train, "restart")
    assert (restart["rl_step"], restart["checkpoint"]) == (2, None)
    assert newest_valid(train.run_dir / "checkpoints").name == "step-000002"


@pytest.mark.slow
@pytest.mark.processes
def test_two_deaths_in_the_last_save_end_the_run(running: Any) -> None:
    train = running(
        *AGAIN,
        "callbacks.checkpoint.every=1000",
        "max_rl_steps=2",
        *fault("save", 0, "kill"),
        fork=True,
    )
    assert train.finish() == 1, train.stderr
    assert (
        "the run has died after its last RL step before (rank 0 (trainer) was killed"
        in train.summary["cause"]
    )
    assert len(events(train, "restart")) == 1


@pytest.mark.slow
@pytest.mark.processes
def test_a_poison_step_ends_the_run_with_both_causes(running: Any) -> None:
    """Nothing is saved before it, so the second attempt comes to the same point."""
    train = running(
        *AGAIN, "callbacks.checkpoint.every=99", *fault("publish", 0, "kill", call=3), fork=True
    )
    assert train.finish() == 1, train.stderr
    assert len(events(train, "restart")) == 1
    assert train.summary["status"] == "failed"
    assert (
        "RL step 2 is poison: the run has died in it before (rank 0 (trainer) was killed"
        in train.summary["cause"]
    )
    assert train.stdout.splitlines()[-1] == str(train.run_dir)


@pytest.mark.slow
@pytest.mark.processes
def test_a_stop_ends_the_pause_before_a_restart(running: Any) -> None:
    train = running(
        *SMALL,
        "allocation.max_restarts=1",
        "allocation.restart_pause_s=60",
        "max_rl_steps=99",
        fork=True,
    )
    train.wait_for_step(2)
    train.ranks()[0].kill()
    while not events(train, "restart"):
        time.sleep(0.05)
    os.kill(train.pid, signal.SIGTERM)
    assert train.finish() == 128 + signal.SIGTERM, train.stderr
    assert (train.summary["status"], train.summary["cause"]) == (
        "stopped",
        "signal SIGTERM, before it began again",
    )
    assert f"to continue: digenrl resume {train.run_dir}" in train.stderr


def test_how_often_a_run_begins_again() -> None:
    restarts = Restarts(2, 1.5, 10)
    assert restarts.refuse_restart("a", 0, 4) is None
    assert restarts.pause_s == 1.5
    assert (
        restarts.refuse_restart("b", 3, 3) is None
    )  # the restart itself died, before its first step
    assert restarts.pause_s == 3.0
    assert (
        restarts.refuse_restart("c", 3, 9)
        == "c; it had begun again 2 times (allocation.max_restarts)"
    )
    assert (
        Restarts(3, 1.0, 10).refuse_restart("wrong from the start", 5, 5) == "wrong from the start"
    )
    assert Restarts(0, 1.0, 10).refuse_restart("off", 0, 7) == "off"
    poison = Restarts(9, 1.0, 10)
    poison.refuse_restart("first", 0, 7)
    assert (
        poison.refuse_restart("second", 5, 7)
        == "second; RL step 8 is poison: the run has died in it before (first)"
    )
    assert poison.refuse_restart("third", 5, 10) is None
    assert (
        poison.refuse_restart("fourth", 5, 10)
        == "fourth; the run has died after its last RL step before (third)"
    )


@pytest.mark.slow
@pytest.mark.processes
def test_a_killed_launcher_is_begun_again_by_keep_sh_and_costs_time_alone(
    running: Any, tmp_path: Path
) -> None:
    """Nothing of the killed one is left when the next begins."""
    same = (*AGAIN, "schedule=gap", "callbacks.checkpoint.every=2", "max_rl_steps=6")
    calm = running(*same, fork=True)
    assert calm.finish() == 0, calm.stderr
    kept = running(*same, wrapper=KEPT)
    kept.wait_for_step(3)
    (launcher,) = psutil.Process(kept.pid).children()
    ranks = launcher.children()
    launcher.kill()
    killed = time.time()
    assert kept.finish() == 0, kept.stderr
    assert weights(kept) == weights(calm)
    again = [row["time"] - killed for row in events(kept, "publish") if row["time"] > killed]
    assert again[1] < 60, "from the kill to the end of the first further step"
    assert "the command was killed: it begins again from" in kept.stderr
    assert "the launcher (process" in kept.stderr
    assert all(state_of(process.pid) == "gone" for process in ranks)
    assert (kept.summary["status"], kept.summary["rl_steps"]) == ("completed", 6)


@pytest.mark.slow
@pytest.mark.processes
def test_keep_sh_passes_a_stop_on_and_ends_with_it(running: Any) -> None:
    kept = running(*SMALL, "max_rl_steps=1000", wrapper=KEPT)
    kept.wait_for_step(1)
    os.kill(kept.pid, signal.SIGTERM)
    assert kept.finish() == 128 + signal.SIGTERM, kept.stderr
    assert (kept.summary["status"], kept.summary["cause"]) == ("stopped", "signal SIGTERM")
