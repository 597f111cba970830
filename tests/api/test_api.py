"""digenrl from Python: what the commands do, as functions; `import digenrl` stays light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import digenrl
from digenrl.data import load_prompts
from digenrl.earlier_run import NoCheckpoint
from tests.extensions.export.test_export import make_run
from tests.report.synthetic import write_run

DIGITS = ["number seven", "number two"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A digits run with a checkpoint whose weights are not those of the base model, and one
    evaluation."""
    directory = tmp_path_factory.mktemp("api") / "run"
    make_run(directory, "experiment=digits_flowgrpo")
    return directory


def test_the_import_is_light() -> None:
    code = (
        "import digenrl, sys; print(sorted({'torch', 'numpy', 'hydra', 'matplotlib'} & "
        "set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match=r"it has .*load_run"):
        _ = digenrl.load_runs  # type: ignore[attr-defined]


def test_a_run_is_read(tmp_path: Path) -> None:
    run = digenrl.load_run(write_run(tmp_path / "run", steps=8))
    assert run.metrics["rl_step"] == list(range(1, 9))
    assert {len(column) for column in run.metrics.values()} == {8}
    assert run.evals["heldout"][-1] == run.summary["heldout_last"]
    assert run.config["experiment_name"] == "digits_flowgrpo"
    assert [samples.rl_step for samples in run.samples] == [0, 8]
    with pytest.raises(FileNotFoundError, match="no such directory"):
        digenrl.load_run(tmp_path / "nowhere")
    assert repr(run) == f"LoadedRun({str(tmp_path / 'run')!r}, 8 RL steps)"
    assert "<tr><th>status</th><td>" in run._repr_html_()
    assert repr(run.samples[-1]).startswith("Samples(RL step 8, media [")


@pytest.mark.heavy
def test_samples_are_those_of_the_runs_own_evaluation(trained: Path) -> None:
    run = digenrl.load_run(trained)
    stored = run.samples[-1]
    prompts = load_prompts("digits.jsonl")[:2]
    drawn = digenrl.sample(run, prompts, samples=2)
    assert (drawn.rl_step, drawn.prompts) == (stored.rl_step, stored.prompts)
    assert np.array_equal(drawn.media, stored.media)
    alone = digenrl.sample(run, prompts[0].text, samples=2)
    assert alone.prompts == (prompts[0].text,) * 2
    base = digenrl.sample(trained, prompts, weights="base", samples=2)
    assert not np.array_equal(base.media, drawn.media)
    assert not np.array_equal(digenrl.sample(run, prompts, samples=2, seed=1).media, drawn.media)
    solved = digenrl.sample(run, prompts, "sampling.eval.solver=dpm2", samples=2)
    assert not np.array_equal(solved.media, drawn.media), "what an evaluation would do"


@pytest.mark.parametrize("wrong", [{"weights": "trained"}, {"samples": 0}, {"steps": 0}])
def test_what_can_not_be_sampled_is_refused_before_the_run_is_read(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name} = "):
        digenrl.sample("no run", ["a prompt"], **wrong)


@pytest.mark.heavy
def test_a_run_without_a_checkpoint_has_only_its_base_model(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((trained / "config.yaml").read_text())
    assert digenrl.sample(tmp_path, DIGITS, samples=1, weights="base").media.shape == (2, 1, 8, 8)
    with pytest.raises(NoCheckpoint):
        digenrl.sample(tmp_path, DIGITS)


@pytest.mark.heavy
def test_an_average_that_has_not_moved_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ema = "+algorithm.ema={_target_: digenrl.algorithms.copies.Ema, decay: 0.5, every: 8}"
    make_run(tmp_path / "run", "experiment=digits_flowgrpo", ema)
    last, base = (
        digenrl.sample(tmp_path / "run", DIGITS, samples=1, weights=name)
        for name in ("last", "base")
    )
    assert np.array_equal(last.media, base.media)
    assert "still the base model: it follows every 8 optimizer steps" in capsys.readouterr().err


@pytest.mark.heavy
def test_bytes_and_fractions_score_alike() -> None:
    media = np.random.default_rng(0).integers(0, 256, (2, 3, 16, 16), dtype=np.uint8)
    scored = digenrl.score("jpeg", media, ["a", "b"])
    assert scored.total.shape == (2,)
    assert np.array_equal(scored.rewards["jpeg_size"], scored.total)
    assert np.allclose(digenrl.score("jpeg", media / 255.0, ["a", "b"]).total, scored.total)
    with pytest.raises(digenrl.config.ConfigError, match="nearest: jpeg"):
        digenrl.score("jpg", media, ["a", "b"])
    with pytest.raises(ValueError, match="1 prompts"):
        digenrl.score("jpeg", media, ["a"])


@pytest.mark.slow
def test_a_plan_is_the_content_of_its_file() -> None:
    small = ["data.prompts_per_batch=8", "algorithm.updates_per_batch=1", "plan.simulated_steps=4"]
    plan = digenrl.plan("experiment=sd35_flowgrpo", "hardware=node_8xh100", *small)
    assert plan["pools"] == {"h100": 8}
    assert plan["candidates"][0]["step_s"] >= plan["bound_step_s"] > 0
