"""A run that starts from the adapter of a file (`model.lora.path`), from the command to its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from digenrl.config import load
from tests.models.test_lora_files import LORA, as_peft
from tests.models.tiny_policies import randomise_lora
from tests.strategy.processes import TINY
from tests.training import SMALL, Train

pytestmark = pytest.mark.processes

LAST = Path("checkpoints", "last", "policy.safetensors")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: Any) -> Path:
    """An adapter of the digits' base, as PEFT writes it."""
    policy = load(list(TINY)).settings.build("model")
    assert (policy.adapter.lora.rank, policy.adapter.lora.alpha) == (LORA["rank"], LORA["alpha"])
    randomise_lora(policy, std=0.1)
    return as_peft(policy, tmp_path_factory.mktemp("adapter"))


def finished(train: Train) -> Train:
    assert train.finish() == 0, train.stderr
    return train


def test_kl_is_against_the_start_and_a_resume_ends_with_the_same_weights(
    running: Any, adapter: Path
) -> None:
    """The run's directory starts another run, which draws what the first would draw."""
    words = (*SMALL, f"model.lora.path={adapter}", "algorithm.kl_weight=0.05")
    start = (*words, "algorithm.reference=start")
    whole = finished(running(*start, "max_rl_steps=2", fork=True))
    base = finished(running(*words, "algorithm.reference=base", "max_rl_steps=1", fork=True))
    halves = finished(running(*start, "max_rl_steps=1", fork=True))
    steps = [row for row in whole.rows("metrics.jsonl") if row["kind"] == "step"]
    assert steps[0]["kl"] == 0.0
    assert steps[1]["kl"] > 0.0
    assert next(r for r in base.rows("metrics.jsonl") if r["kind"] == "step")["kl"] > 0.0
    finished(running(f"resume={halves.run_dir}", "max_rl_steps=2", tiny=(), fork=True))
    wanted = load_file(whole.run_dir / LAST)
    for name, value in load_file(halves.run_dir / LAST).items():
        assert torch.equal(value, wanted[name]), name
    again = load([*TINY, f"model.lora.path={whole.run_dir}"]).settings.build("model")
    for name, value in again.adapter.trained_parameters().items():
        assert torch.equal(value.detach(), wanted[name]), name
