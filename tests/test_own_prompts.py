"""Prompts of one's own that a reward cannot score are refused before ranks start, each once, with
file and line: for training, for the evaluation, and for `digenrl eval`."""

from __future__ import annotations

from pathlib import Path

import pytest

from digenrl import config
from digenrl.cli.evaluate import main as evaluate
from digenrl.cli.extensions import choose_advisor
from digenrl.launchers.job import NotStarted, prepare_job
from digenrl.types import Prompt


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.txt"
    file.write_text("\n".join(f"a picture of thing {'abcdefghijklmnop'[n]}" for n in range(16)))
    return file


@pytest.mark.parametrize("key", ["data.prompts", "data.heldout", "callbacks.evaluation.prompts"])
@pytest.mark.parametrize(
    ("experiment", "reward"), [("scenes_flowgrpo", "assertions"), ("digits_flowgrpo", "judge_a")]
)
def test_a_prompt_that_no_reward_can_score_is_named_with_its_line(
    mine: Path, experiment: str, reward: str, key: str
) -> None:
    words = [f"experiment={experiment}", f"{key}=mine.txt", "callbacks.evaluation.max_prompts=null"]
    if key != "data.prompts":
        words.append("callbacks.evaluation.heldout_prompts=null" * (key[0] == "c") or "seed=0")
    with pytest.raises(NotStarted) as caught:
        prepare_job(config.load(words), choose_advisor())
    lines = str(caught.value).splitlines()
    first = [line for line in lines if f"{mine}:1:" in line]
    assert first[0].startswith(f"{key}: {mine}:1: reward {reward} cannot score it")
    assert len(lines) == len(set(lines))


def test_statistics_are_asked_as_rewards_are(mine: Path) -> None:
    words = ["experiment=scenes_flowgrpo", "reward=jpeg", "data.heldout=mine.txt"]
    with pytest.raises(NotStarted, match=r"mine\.txt:1: statistic SceneStatistics cannot score it"):
        prepare_job(config.load(words), choose_advisor())


def test_an_evaluation_says_so_before_it_loads_anything(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = config.prepare_run_dir(
        config.load(["experiment=digits_flowgrpo", f"hydra.run.dir={mine.parent}/run-0"])
    )
    assert evaluate([f"run={run}", "step=base", "data=mine.txt"]) == 2
    said = capsys.readouterr().err
    assert f"data.heldout: {mine}:1: reward judge_a cannot score it" in said
    assert "Traceback" not in said


def test_what_scores_by_prompts_can_be_asked_before() -> None:
    """A class that refuses a prompt when scoring must also refuse the prompt beforehand."""
    from reward_models import digit_judge, scene_judges

    for scorer in (
        digit_judge.DigitJudge,
        digit_judge.DigitStatistics,
        scene_judges.SceneDetector,
        scene_judges.SceneJudge,
        scene_judges.SceneStatistics,
    ):
        with pytest.raises(ValueError, match="write"):
            scorer.check_prompts([Prompt("a horse")])
