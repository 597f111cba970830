"""A non-finite number on one of two trainer ranks: both skip the update, and three in a row stop
the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.strategy.processes import TINY
from tests.training import fork_command

pytestmark = pytest.mark.processes

POISONED = (1, 3, 4, 5)
CAUSES = [
    "gradient",
    *(pytest.param(what, marks=pytest.mark.slow) for what in ("reward", "advantage", "ratio")),
]


@pytest.mark.parametrize("what", CAUSES)
def test_a_poisoned_update_is_skipped_on_all_ranks_and_the_third_in_a_row_stops(
    tmp_path: Path, what: str
) -> None:
    words = [
        *TINY,
        "data.prompts_per_batch=2",
        "algorithm.kl_weight=0",
        "max_rl_steps=9",
        "allocation.trainers=2",
        "allocation.rollouts=1",
        "callbacks.checkpoint.every=1",
        "allow_targets=[tests]",
        f"output_root={tmp_path}",
        f"+callbacks.poison={{_target_: tests.algorithms.poison.Poison, what: {what}, rank: 1, "
        f"steps: {[*POISONED]}}}",
    ]
    train = fork_command(tmp_path / "train", words)
    assert train.finish() == 1, train.stderr
    run_dir = Path(train.stdout.strip().splitlines()[-1])
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "3 updates in a row were not finite, stopping: gradient norm is" in summary["cause"]
    assert "trainer" in summary["cause"]

    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    digests = {event["version"]: event["digest"] for event in events if event["kind"] == "publish"}
    unchanged = [digests[version + 1] == digests[version] for version in range(max(digests))]
    assert unchanged == [
        step in POISONED for step in range(5)
    ]  # version 5 is the last that was published

    assert "skipped on all ranks, no weight changed" in summary["cause"]
    weights = load_file(run_dir / "checkpoints" / "last" / "policy.safetensors")
    assert all(bool(torch.isfinite(value).all()) for value in weights.values())
