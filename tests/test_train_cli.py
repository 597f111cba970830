"""`python -m digenrl.cli.train` as a user meets it: what a run leaves behind, how it stops, and how it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import ROOT
from tests.strategy.cluster import TINY

GONE_WITHIN_S = 10.0
"""Every process of a failed run."""
PATIENCE_S = 150.0
"""For a whole run on a machine that does other things too."""


@dataclass
class Train:
    """A train command in progress."""

    process: subprocess.Popen[str]
    root: Path

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
        """The ranks that the command has forked (not what a library starts for a moment)."""
        try:
            parent = psutil.Process(self.process.pid)
            own = parent.cmdline()
            return [child for child in parent.children() if _command(child) == own]
        except psutil.NoSuchProcess:
            return []

    def rows(self, name: str) -> list[dict[str, Any]]:
        files = list(self.root.glob(f"outputs/*/*/{name}"))
        return [json.loads(line) for line in files[0].read_text().splitlines() if line.endswith("}")] if files else []

    def wait_for_step(self, step: int) -> None:
        """Until `step` RL steps are finished."""
        deadline = time.monotonic() + PATIENCE_S
        while not any(row["kind"] == "step" and row["rl_step"] >= step for row in self.rows("metrics.jsonl")):
            assert self.process.poll() is None, f"ended early: {self.stderr}"
            assert time.monotonic() < deadline, f"no step {step}: {self.stderr}"
            time.sleep(0.05)

    def finish(self, timeout: float = PATIENCE_S) -> int:
        return self.process.wait(timeout)

    @property
    def summary(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return loaded


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Any]:
    """Starts train commands, and leaves none behind."""
    started: list[Train] = []

    def start(*words: str, tiny: Sequence[str] = TINY) -> Train:
        root = tmp_path / str(len(started))
        root.mkdir()
        environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
        with (root / "stdout").open("w") as out, (root / "stderr").open("w") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "digenrl.cli.train", *tiny, *words],
                cwd=root, stdout=out, stderr=err, env=environment, text=True, start_new_session=True,
            )  # fmt: skip
        started.append(Train(process, root))
        return started[-1]

    yield start
    for train in started:
        for process in [*train.ranks(), psutil.Process()] if train.process.poll() is None else []:
            if process.pid != os.getpid():
                process.kill()
        if train.process.poll() is None:
            train.process.kill()
        train.process.wait(10)


SMALL = ("data.prompts_per_batch=2", "sampling.steps=3", "callbacks.checkpoint.every=1")


def test_a_run_leaves_its_files_and_ends_with_its_directory(running: Any) -> None:
    train = running(*SMALL, "logger=csv", "schedule=full", "schedule.tsp.batch=1")
    assert train.finish() == 0, train.stderr
    run_dir = Path(train.stdout.splitlines()[-1])
    assert run_dir == train.run_dir
    for name in ("config.yaml", "metrics.jsonl", "events.jsonl", "trace.json", "report.html", "summary.json"):
        assert (run_dir / name).stat().st_size > 0, name
    assert (run_dir / "checkpoints/last/policy.safetensors").is_file()
    summary = train.summary
    assert (summary["status"], summary["cause"], summary["rl_steps"]) == ("completed", None, 2)
    assert summary["first_ratio_max_dev"] == 0.0
    assert summary["world"] == {"trainer": 1, "rollout": 1}
    assert sum(summary["dropped"].values()) == 0
    published = [row for row in train.rows("events.jsonl") if row["kind"] == "publish"]
    adopted = [row for row in train.rows("spans/rank-001.jsonl") if row["stage"] == "adopt"]
    assert [row["version"] for row in published][:2] == [0, 1]
    digests = {row["version"]: row["digest"] for row in published}
    assert {row["version"]: row["digest"] for row in adopted}.items() <= digests.items()
    assert len(adopted) >= 2


def fault(point: str, rank: int, action: str, call: int = 1) -> list[str]:
    """Words that order a fault (see tests.strategy.faults)."""
    settings = {"_target_": "tests.strategy.faults.Fault", "point": point, "rank": rank, "action": action, "call": call}
    inside = ",".join(f"{key}:{value}" for key, value in settings.items())
    return ["allow_targets=[tests]", f"+callbacks.fault={{{inside}}}"]


def assert_failed(train: Train, cause: str) -> None:
    """The command fails, names the rank and the way on, and nothing of it is left."""
    limit = time.monotonic() + PATIENCE_S
    ranks: dict[int, psutil.Process] = {}
    first_gone, last_seen = None, 0.0
    while train.process.poll() is None:
        assert time.monotonic() < limit, f"hangs: {train.stderr}"
        alive = {process.pid: process for process in train.ranks()}
        ranks |= alive
        states = [_state(process) for process in ranks.values()]
        if first_gone is None and any(state in ("gone", "zombie", "stopped") for state in states):
            first_gone = time.monotonic()
        if not all(state in ("gone", "zombie") for state in states):
            last_seen = time.monotonic()
        time.sleep(0.05)
    assert first_gone is not None, "no rank was seen to fail"
    assert last_seen - first_gone < GONE_WITHIN_S
    assert train.process.returncode not in (0, None)
    _, alive_ = psutil.wait_procs(list(ranks.values()), timeout=GONE_WITHIN_S)
    assert not alive_, f"left behind: {alive_}"
    summary = train.summary
    assert summary["status"] == "failed"
    assert cause in summary["cause"], summary["cause"]
    assert cause in train.stderr
    assert f"resume RUN={train.run_dir}" in train.stderr
    assert train.stdout.splitlines()[-1] == str(train.run_dir)
    assert "Traceback" not in train.stderr


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def _state(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return "gone"


def test_a_killed_rollout_is_named_and_the_run_can_be_resumed(running: Any) -> None:
    train = running(*SMALL, "max_rl_steps=3", *fault("denoise", 1, "kill", call=15))
    assert_failed(train, "rank 1 (rollout) was killed by signal 9")
    assert (train.run_dir / "checkpoints/last").exists()
    again = running(f"resume={train.run_dir}", "~callbacks.fault", tiny=())
    assert again.finish() == 0, again.stderr
    assert Path(again.stdout.splitlines()[-1]) == train.run_dir
    assert train.summary["status"] == "completed"
    assert train.summary["rl_steps"] == 3
    assert train.summary["restarts"] == 1


def test_a_scorer_that_raises_fails_the_run_with_its_message(running: Any) -> None:
    words = ["allow_targets=[tests]", "reward.rewards.judge_a.scorer._target_=tests.strategy.faults.Broken"]
    assert_failed(running(*SMALL, *words), "the scorer has a bug")


def test_a_suspended_rank_does_not_hang_the_run(running: Any) -> None:
    assert_failed(running(*SMALL, *fault("accumulate", 0, "stop", call=3)), "rank 0 (trainer) stopped responding")


def test_no_rank_outlives_a_killed_launcher(running: Any) -> None:
    train = running(*SMALL, "max_rl_steps=1000")
    train.wait_for_step(1)
    ranks = train.ranks()
    assert len(ranks) >= 2
    train.process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(ranks, timeout=GONE_WITHIN_S)
    assert not alive
    assert train.finish() == -signal.SIGKILL


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="ctrl-c"),
        pytest.param(signal.SIGTERM, id="sigterm", marks=pytest.mark.slow),
    ],
)
def test_a_stop_request_ends_the_run_cleanly_with_a_checkpoint(running: Any, number: int) -> None:
    train = running(*SMALL, "max_rl_steps=1000", "callbacks.checkpoint.every=1000")
    train.wait_for_step(2)
    ranks = train.ranks()
    os.killpg(train.process.pid, number) if number == signal.SIGINT else train.process.send_signal(number)
    _, alive = psutil.wait_procs(ranks, timeout=8.0)  # 5 s and what it takes to see it on a busy machine
    assert not alive
    assert train.finish() == 128 + number
    assert train.summary["status"] == "stopped"
    assert train.summary["cause"] == f"signal {signal.Signals(number).name}"
    steps = train.summary["rl_steps"]
    assert (train.run_dir / "checkpoints/last").resolve().name == f"step-{steps:06d}"
    assert f"resume RUN={train.run_dir}" in train.stderr
    assert train.stdout.splitlines()[-1] == str(train.run_dir)


ROLES = {0: "trainer", 1: "trainer", 2: "rollout"}
EVERY_POINT = [
    *[(point, rank) for point in ("before_join", "after_join", "receive", "publish") for rank in (0, 1)],
    *[(point, rank) for point in ("accumulate", "reduce") for rank in (0, 1)],
    *[(point, 2) for point in ("before_join", "after_join", "claim", "denoise", "reward", "send", "receive")],
]


@pytest.mark.slow
@pytest.mark.parametrize("action", ["kill", "stop", "raise"])
@pytest.mark.parametrize(("point", "rank"), EVERY_POINT)
def test_any_rank_may_fail_at_any_point(running: Any, point: str, rank: int, action: str) -> None:
    train = running(*SMALL, "allocation.trainers=2", "allocation.rollouts=1", *fault(point, rank, action))
    name = f"rank {rank} ({ROLES[rank]})"
    causes = {"kill": f"{name} was killed by signal 9", "stop": f"{name} stopped responding", "raise": "injected fault"}
    assert_failed(train, causes[action])


@pytest.mark.slow
@pytest.mark.parametrize(("point", "rank"), EVERY_POINT)
def test_the_launcher_may_be_killed_at_any_point(running: Any, point: str, rank: int) -> None:
    train = running(*SMALL, "allocation.trainers=2", "allocation.rollouts=1", *fault(point, rank, "kill-launcher"))
    ranks: dict[int, psutil.Process] = {}
    while train.process.poll() is None:
        ranks |= {process.pid: process for process in train.ranks()}
        time.sleep(0.02)
    assert train.process.returncode == -signal.SIGKILL
    assert len(ranks) >= 3
    _, alive = psutil.wait_procs(list(ranks.values()), timeout=GONE_WITHIN_S)
    assert not alive
