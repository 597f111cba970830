"""Commands and functions of the API compute on the device of their process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

import digenrl
from digenrl.cli import evaluate
from digenrl.config.help import read_arguments
from digenrl.data import load_prompts
from digenrl.extensions.bench.cli import benchmark
from digenrl.extensions.export.cli import export
from digenrl.extensions.planner.cli import profile
from tests.cli.finished import finished_run
from tests.extensions.export.test_export import make_run
from tests.strategy.processes import TINY

strict = torch.get_device_module("strict")
SEVEN = load_prompts("digits.jsonl")[:2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint and an evaluation, both made on the CPU."""
    directory = tmp_path_factory.mktemp("commands") / "run"
    make_run(directory, "experiment=digits_flowgrpo")
    return directory


@contextmanager
def on_the_device(at_least: int = 40_000) -> Iterator[None]:
    """The body's work holds `at_least` bytes of the device: the network that it uses."""
    before = strict.memory_allocated()
    strict.reset_peak_memory_stats()
    yield
    held = strict.max_memory_allocated() - before
    assert held >= at_least, f"{held} bytes of the device"


def test_eval(run: Path) -> None:
    """The CPU's pictures of the base and of the checkpoint, scored alike."""
    words = [f"run={run}", "callbacks.evaluation.samples_per_prompt=2"]
    with on_the_device():
        result = evaluate.evaluate_run(*read_arguments(evaluate.EvaluateKeys, words, others=True))
    assert result["base"]["samples"] == result["last"]["samples"] == 4
    assert result["last"]["reward"] != result["base"]["reward"]


def test_sample(run: Path) -> None:
    stored = digenrl.load_run(run).samples[-1]
    with on_the_device():
        drawn = digenrl.sample(run, SEVEN, samples=2)
    assert np.array_equal(drawn.media, stored.media)


def test_two_steps_of_the_loop() -> None:
    with on_the_device():
        loop = digenrl.rl_loop(*TINY)
        before = {
            name: p.detach().clone() for name, p in loop.policy.adapter.trained_parameters().items()
        }
        for _ in range(2):
            metrics = loop.train(loop.generate())
        loop.close()
    assert metrics["grad_norm"] > 0
    assert all(p.device.type == "strict" for p in loop.policy.parameters())
    assert any(
        not torch.equal(before[n], p) for n, p in loop.policy.adapter.trained_parameters().items()
    )


def test_score(tmp_path: Path) -> None:
    (tmp_path / "reward").mkdir()
    node = {"scorer": {"_target_": "tests.device.scorers.DeviceNumber"}}
    (tmp_path / "reward" / "where.yaml").write_text(
        yaml.safe_dump({"_target_": "digenrl.rewards.suite.RewardSuite", "rewards": {"a": node}})
    )
    media = np.zeros((2, 3, 8, 8), dtype=np.uint8)
    words = f"--config-dir={tmp_path}", "allow_targets=[tests.device.scorers]"
    assert digenrl.score("where", media, ["a", "b"], *words).total.tolist() == [0.0, 0.0]


def test_export(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main([f"run={run}", f"out={tmp_path / 'out'}"]) == 0
    folder = Path(capsys.readouterr().out.splitlines()[-1])
    written = load_file(next(folder.glob("**/*.safetensors")))
    kept = load_file(next(run.glob("checkpoints/*/policy.safetensors")))
    assert written
    assert {v.abs().sum().item() for v in written.values()} == {
        v.abs().sum().item() for v in kept.values()
    }


def test_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with on_the_device():
        assert profile.main([*TINY, f"output_root={tmp_path}"]) == 0
    table = yaml.safe_load(Path(capsys.readouterr().out.splitlines()[-1]).read_text())["seconds"]
    assert all(seconds > 0 for pools in table.values() for seconds in pools.values())


@pytest.mark.slow
def test_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tmp_path, "scenes_flowgrpo")
    words = [f"run={run}", "suite=scenes", "prompts=2", "samples=1", "sampling.eval.steps=2"]
    with on_the_device():
        assert benchmark.main([*words, "ranks=1"]) == 0
    path = Path(capsys.readouterr().out.splitlines()[-1])
    assert set(json.loads(path.read_text())["models"]) == {"base", "step-000007"}
    for picture in path.parent.glob("*/*/samples/*.png"):
        assert np.asarray(Image.open(picture)).std() > 0, picture
