"""Rollouts come and go: membership changes time, never what is computed (I15)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from digenrl.cli import join
from digenrl.launchers import agreement
from digenrl.strategy.checkpoint_io import newest_valid
from tests.storm import published
from tests.training import PATIENCE_S, SMALL, Train, commands

pytestmark = [pytest.mark.processes, pytest.mark.alone, pytest.mark.slow]

WORDS = (
    *SMALL,
    "schedule=gap",
    "allocation.trainers=1",
    "callbacks.checkpoint.every=1000",
    "max_rl_steps=12",
    "allocation.patience_s=60",
)
LONG = ("sampling.steps=20",)
"""Some seconds, so that processes can come and go in between."""


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """version -> digest of its weights, of the run that nobody disturbs."""
    started = commands(tmp_path_factory.mktemp("calm"))
    train = next(started)(*WORDS, *LONG, "allocation.rollouts=1", fork=True)
    assert train.finish() == 0, train.stderr
    next(started, None)
    return published(train)


def events(train: Train, kind: str) -> list[dict[str, Any]]:
    return [row for row in train.rows("events.jsonl") if row["kind"] == kind]


def wait_for(reached: Callable[[], Any], train: Train) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := reached()):
        assert train.poll() is None, f"ended early: {train.stderr}"
        assert time.monotonic() < deadline, train.stderr
        time.sleep(0.02)
    return found


def tasks_of(train: Train, rank: int) -> list[dict[str, Any]]:
    return [row for row in train.rows(f"spans/rank-{rank:03d}.jsonl") if row["stage"] == "generate"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_rollout_that_is_asked_to_go_leaves_and_the_run_goes_on(
    running: Any, calm: dict[int, str], number: signal.Signals
) -> None:
    train = running(*WORDS, *LONG, "allocation.rollouts=2", fork=True)
    train.wait_for_step(1)
    os.kill(train.ranks()[2].pid, number)
    asked = time.time()
    (left,) = wait_for(lambda: events(train, "left"), train)
    assert left["time"] - asked < 5.0
    assert left["cause"] == f"rank 2 (rollout) left: signal {number.name}"
    assert train.finish() == 0, train.stderr
    assert published(train) == calm
    assert train.summary["lost"] == []


def test_rollouts_join_die_and_leave_and_the_run_computes_the_same(
    running: Any, calm: dict[int, str]
) -> None:
    train = running(*WORDS, *LONG, "allocation.rollouts=1", fork=True)
    train.wait_for_step(1)
    first = running(f"run={train.run_dir}", tiny=(), fork=True, command="join")
    wait_for(lambda: tasks_of(train, 2), train)
    (joined,) = events(train, "joined")
    epoch = json.loads((train.run_dir / "access.json").read_text())["epoch"]
    assert tasks_of(train, 2)[0]["start"] + epoch - joined["time"] < 5.0
    psutil.Process(first.pid).children()[0].suspend()
    suspended = time.time()
    (lost,) = wait_for(lambda: events(train, "lost"), train)
    assert lost["cause"].startswith("rank 2 (rollout) stopped responding")
    assert lost["time"] - suspended < 10.0
    assert first.finish() == 1
    second = running(f"run={train.run_dir}", tiny=(), fork=True, command="join")
    wait_for(lambda: tasks_of(train, 3), train)
    killed = time.time()
    os.kill(second.pid, signal.SIGKILL)
    (_, lost) = wait_for(lambda: (rows := events(train, "lost"))[1:] and rows, train)
    assert lost["rank"] == 3
    assert lost["time"] - killed < 1.0
    third = running(f"run={train.run_dir}", tiny=(), fork=True, command="join")
    wait_for(lambda: tasks_of(train, 4), train)
    os.killpg(third.pid, signal.SIGINT)  # as Ctrl-C in its terminal
    assert third.finish() == 0, third.stderr
    assert "left the run, which goes on" in third.stderr
    assert train.finish() == 0, train.stderr
    assert [row["rank"] for row in events(train, "left")] == [4]
    assert published(train) == calm
    assert not (train.run_dir / "access.json").exists()


def test_the_last_rollout_leaves_and_the_run_waits_for_another(
    running: Any, calm: dict[int, str]
) -> None:
    train = running(*WORDS, *LONG, "allocation.rollouts=1", fork=True)
    train.wait_for_step(1)
    os.kill(train.ranks()[1].pid, signal.SIGTERM)
    wait_for(lambda: events(train, "left"), train)
    other = running(f"run={train.run_dir}", tiny=(), fork=True, command="join")
    assert train.finish() == 0, train.stderr
    assert other.finish() == 0, other.stderr
    assert published(train) == calm


def test_a_run_that_nobody_joins_in_time_ends_saved(running: Any) -> None:
    train = running(*WORDS, "allocation.rollouts=1", "allocation.patience_s=0.5", fork=True)
    train.wait_for_step(1)
    os.kill(train.ranks()[1].pid, signal.SIGTERM)
    assert train.finish() == 1, train.stderr
    cause = (
        "rank 1 (rollout) left: signal SIGTERM, the last rollout; no other joined within 0 s "
        "(allocation.patience_s)"
    )
    assert train.summary["cause"] == cause
    assert (
        newest_valid(train.run_dir / "checkpoints").name == f"step-{train.summary['rl_steps']:06d}"
    )
    assert f"to continue: digenrl resume {train.run_dir}" in train.stderr


def test_a_run_goes_on_down_to_the_fewest_rollouts_and_waits_below(running: Any) -> None:
    """{min, max}: max are started; the rank that is left generates while the run waits for
    others."""
    span = ("allocation.rollouts={min:2,max:3}", "allocation.patience_s=1", "max_rl_steps=1000")
    train = running(*WORDS, *span, fork=True)
    train.wait_for_step(1)
    os.kill(train.ranks()[1].pid, signal.SIGTERM)
    (left,) = wait_for(lambda: events(train, "left"), train)
    wait_for(
        lambda: time.time() > left["time"] + 2.0, train
    )  # longer than it would wait for others
    os.kill(train.ranks()[1].pid, signal.SIGTERM)
    assert train.finish() == 1, train.stderr
    few = (
        "rank 2 (rollout) left: signal SIGTERM, and 1 are left of at least 2 "
        "(allocation.rollouts.min)"
    )
    assert train.summary["cause"] == f"{few}; no other joined within 1 s (allocation.patience_s)"
    assert train.summary["world"] == {"trainer": 1, "rollout": 3}
    assert (
        newest_valid(train.run_dir / "checkpoints").name == f"step-{train.summary['rl_steps']:06d}"
    )


def test_who_does_not_belong_is_refused_with_the_remedy(
    running: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train = running(*WORDS, "max_rl_steps=1000", "allocation.rollouts=1", fork=True)
    train.wait_for_step(1)
    here = socket.gethostname()
    port = json.loads((train.run_dir / "access.json").read_text())["port"]

    def refused(*words: str, run: Path | None = None) -> str:
        assert join.main([f"run={run or train.run_dir}", *words]) == 2
        return capsys.readouterr().err

    monkeypatch.setenv("DIGENRL_RUN_TOKEN", "0" * 32)
    assert "the token is not that of the run" in refused()
    monkeypatch.delenv("DIGENRL_RUN_TOKEN")
    said = refused("seed=3", "data.group_size=8")
    assert (
        "data.group_size = 8 (the run's: 4); seed = 3 (the run's: 0). Copy config.yaml anew" in said
    )
    with monkeypatch.context() as patch:
        patch.setattr(agreement, "code_version", lambda: "another")
        patch.setattr(torch.version, "cuda", "99.1")
        patch.setattr(socket, "gethostname", lambda: "elsewhere")
        said = refused()
        assert "code is another (there: digenrl " in said
        assert "CUDA is 99.1 (there: " in said
        assert (
            f"this rollout on elsewhere differs from the run at 127.0.0.1:{port} on {here}" in said
        )
        assert "start the rollout from the same checkout and environment" in said
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "elsewhere")
        patch.setenv("HF_HOME", str(tmp_path / "none"))
        assert "none: no such directory on elsewhere" in refused()
    assert "give HOST:PORT" in refused("address=here")
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(train.run_dir / "config.yaml", copy)
    assert "no run is running here: access.json is missing" in refused(run=copy)
    shutil.copy(train.run_dir / "access.json", copy)
    (copy / "access.json").chmod(0o644)
    assert "wanted are user" in refused(run=copy)
    (copy / "access.json").chmod(0o600)
    os.kill(train.pid, signal.SIGTERM)
    train.finish()
    assert "this run has ended; continue it first" in refused()
    assert "no run answers at 127.0.0.1" in refused(run=copy)
