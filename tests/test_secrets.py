"""A planted canary: what the environment holds appears in nothing that a run writes, whatever its
scorer says."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from digenrl.rewards.service import RewardService
from reward_models.digit_judge import DigitJudge
from tests.conftest import ROOT
from tests.rewards.services import running
from tests.strategy.processes import TINY

pytestmark = pytest.mark.processes

SECRETS = {
    "DIGENRL_REWARD_TOKEN": "canary-reward-7d1f0c55",
    "WANDB_API_KEY": "c0ffee" + "canary7e1d" * 3 + "0123",
    "HF_TOKEN": "hf_canaryCanaryCanary0123456789",
    "DIGENRL_JUDGE_TOKEN": "canary-judge-55aa0912",
}


def command(name: str, *words: str, where: Path) -> subprocess.CompletedProcess[str]:
    """A command of ours, with every secret in its environment."""
    environment = (
        os.environ | SECRETS | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "WANDB_MODE": "offline"}
    )
    return subprocess.run(
        [sys.executable, "-m", "digenrl", name, *words],
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_a_run_with_a_served_reward_writes_no_secret(tmp_path: Path) -> None:
    """The service needs the token. A rank that talks to the service prints and raises the token.
    W&B has its key."""
    service = RewardService(DigitJudge("a"), token=SECRETS["DIGENRL_REWARD_TOKEN"])
    words = [
        "data.prompts_per_batch=2",
        "sampling.steps=3",
        "callbacks.checkpoint.every=1",
        "logger=wandb",
    ]
    leak = "+callbacks.leak={_target_: tests.strategy.faults.Leak}"
    with running(service) as url:
        placed = [
            "reward.placement=http",
            f"reward.urls={{judge_a: ['{url}'], judge_b: ['{url}']}}",
        ]
        run = command(
            "train",
            *TINY,
            *words,
            *placed,
            "allow_targets=[tests]",
            leak,
            where=tmp_path,
        )
    assert run.returncode == 1, run.stderr
    run_dir = Path(run.stdout.splitlines()[-1])
    assert "told on purpose: <redacted>" in (run_dir / "summary.json").read_text()
    assert "said on purpose: <redacted>" in (run_dir / "logs/rank-000.log").read_text()
    assert math.isfinite(_reward(run_dir)), "the service scored the first step"
    exported = command(
        "export",
        f"run={run_dir}",
        "allow_targets=[tests]",
        where=tmp_path,
    )
    assert exported.returncode == 0, exported.stderr
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    names = {path.name for path in written}
    assert {
        "config.yaml",
        "events.jsonl",
        "summary.json",
        "report.html",
        "rank-001.log",
        "README.md",
    } <= names
    assert any(path.suffix == ".wandb" for path in written)
    printed = (run.stdout + run.stderr + exported.stdout + exported.stderr).encode()
    for name, secret in SECRETS.items():
        assert secret.encode() not in printed, name
        leaks = [
            str(path.relative_to(tmp_path))
            for path, content in written.items()
            if secret.encode() in content
        ]
        assert not leaks, f"{name} in {leaks}"


def _reward(run_dir: Path) -> float:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return float(rows[0]["reward"])
