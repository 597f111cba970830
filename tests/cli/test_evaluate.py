"""`make eval`: the base model and a checkpoint from the same noise, refusals before torch is
imported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from digenrl.cli.evaluate import EvaluateKeys, evaluate_run, main, result_table
from digenrl.config.help import read_arguments
from digenrl.earlier_run import NoCheckpoint
from tests.cli.finished import finished_run


def asked(words: list[str]) -> tuple[EvaluateKeys, list[str]]:
    return read_arguments(EvaluateKeys, words, others=True)


SMALL = "callbacks.evaluation.samples_per_prompt=3"
pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("run"), "digits_flowgrpo")


def test_last_compares_the_checkpoint_with_the_base_model(run_dir: Path) -> None:
    result = evaluate_run(*asked([f"run={run_dir}", SMALL]))
    assert result["rl_step"] == 7
    assert result["base"]["samples"] == result["last"]["samples"] == 30
    assert result["last"]["reward"] != result["base"]["reward"]
    assert 0.3 < result["base"]["heldout"] < 0.8
    assert (
        json.loads((run_dir / "eval.json").read_text())["last"]["nn_distance"]
        == result["last"]["nn_distance"]
    )
    assert (run_dir / "eval.png").stat().st_size > 1000


def test_base_needs_no_checkpoint_and_takes_other_prompts_and_steps(
    run_dir: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "run"
    bare.mkdir()
    (bare / "config.yaml").write_text((run_dir / "config.yaml").read_text())
    prompts = tmp_path / "mine.txt"
    prompts.write_text("number two\nnumber five\n")
    request = asked([f"run={bare}", "step=base", f"data={prompts}", "sampling.eval.steps=3", SMALL])
    result = evaluate_run(*request)
    assert (result["prompts"], result["steps"], result["base"]["samples"]) == (2, 3, 6)
    assert "last" not in result
    with pytest.raises(NoCheckpoint, match="step=base"):
        evaluate_run(*asked([f"run={bare}"]))


def test_another_reward_scores_the_same_samples(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = evaluate_run(*asked([f"run={run_dir}", "step=base", "reward=jpeg", SMALL]))
    assert result["base"]["reward"] == result["base"]["reward/jpeg_size"] < 0
    assert "heldout" not in result["base"]
    assert main([f"run={run_dir}", "step=base", "reward=jpg", SMALL]) == 2
    assert "jpeg" in capsys.readouterr().err


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_and_a_run_without_a_whole_one_refused(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, whole = tmp_path / "run", (run_dir / "checkpoints" / "last").resolve()
    folder = broken / "checkpoints" / "step-999999"
    shutil.copytree(whole, folder)
    (broken / "config.yaml").write_text((run_dir / "config.yaml").read_text())
    weights = folder / "policy.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(bytes(damaged))
    assert main([f"run={broken}", SMALL]) == 1
    assert "damaged" in capsys.readouterr().err
    shutil.copytree(whole, folder.with_name(whole.name))
    assert main([f"run={broken}", SMALL]) == 0
    assert f"passed over for {whole.name}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "run: missing; allowed: path of a run directory"),
        (["run=/nowhere"], "run = /nowhere: is no directory; name a run directory"),
        (["run=RUN", "step=first"], "step = first: is none of the choices; allowed: base | last"),
        (["RUN"], "settings are key=value"),
        (["run=RUN", "sampling.eval.step=3"], "sampling.eval.steps"),
        (["run=RUN", "data=absent.txt"], "absent.txt"),
    ],
)
def test_bad_words_are_refused_in_words(
    run_dir: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.replace("RUN", str(run_dir)) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_refusal_does_not_import_torch(run_dir: Path) -> None:
    code = (
        "import sys; from digenrl.cli.evaluate import main; "
        f"assert main(['run={run_dir}', 'data=absent.txt']) == 2; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


def test_a_number_of_one_column_alone_leaves_a_dash() -> None:
    result = {"base": {"reward": 0.5, "noisy_detail": 1.25}, "last": {"reward": 0.75, "kl": 2.0}}
    lines = [line.split() for line in result_table(result).splitlines()]
    assert lines[1:] == [["reward", "0.5", "0.75"], ["noisy_detail", "1.25", "-"], ["kl", "-", "2"]]
