"""The benchmark for several GPUs (`make gpus`), tested with gloo: its steps end as its table says, and
a run that ends otherwise is told."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpus

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(400)]

ON_CPU = ("trainer.accelerator=cpu", "model.dtype=float32")
STEPS = {step.name: step for step in gpus.STEPS}


def test_a_run_under_torchrun_is_resumed_and_a_planted_fault_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that need more GPUs are named too."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    names = "ddp-torchrun,killed-torchrun,lending"
    given = {"gpus": "2", "device": "cpu", "steps": names, "minutes": "6", "quick": "true"}
    assert gpus.main(given) == 0
    told = capsys.readouterr().out
    for words in (
        "completed, resumed",
        "failed: rank 1 (trainer) (process",
        "left out: needs 8 GPUs",
    ):
        assert words in told


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (replace(STEPS["ddp"], resumed=False, fails="planted"), "the run did not fail"),
        (replace(STEPS["raises"], fails=gpus.KILLED), "cause: rank 1 .trainer. raised"),
    ],
    ids=["completes", "fails-otherwise"],
)
def test_a_step_that_ends_otherwise_is_told(step: gpus.Step, told: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=told):
        gpus.judge(step, ON_CPU, tmp_path / "run", 150.0)


def test_a_mistyped_step_is_told() -> None:
    with pytest.raises(SystemExit, match="steps=fsdq: unknown; known: ddp, ddp-torchrun"):
        gpus.main({"gpus": "2", "device": "cpu", "steps": "fsdq", "minutes": "6", "quick": "true"})


def test_a_step_that_does_not_end_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="had not ended after 6 s"):
        gpus.judge(STEPS["ddp"], ON_CPU, tmp_path / "run", 6.0)
