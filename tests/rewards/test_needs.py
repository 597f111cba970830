"""Absent weights are named at once, by every reward alike; prompts that a scorer cannot score, with
their place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from digenrl import config
from digenrl.rewards.needs import placed_scorers, require_weights, unscorable_prompts
from digenrl.rewards.published import WEIGHTS
from digenrl.types import Prompt
from tests.conftest import ROOT

pytestmark = pytest.mark.heavy

LEARNED = (
    *("aesthetic", "clip_score", "edit_reward", "hpsv2", "hpsv3", "image_reward", "ocr_clip"),
    *("pickscore", "video_align"),
)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.parametrize("reward", LEARNED)
def test_absent_weights_say_what_to_download_and_where(reward: str, hub: Path) -> None:
    group = config.load([f"reward={reward}", "data=signs"]).settings.tree.reward
    targets = {
        entry.scorer._target_: name
        for name, entry in group.rewards.items()
        if entry.scorer._target_ in WEIGHTS
    }
    with pytest.raises(ValueError, match=r"reward\.rewards\.\w+\.scorer\.\w+ = ") as caught:
        require_weights(group)
    said = str(caught.value).splitlines()
    assert len(said) == sum(len(WEIGHTS[target]) for target in targets)
    for line in said:
        assert "download them" in line
        assert "=FILE" in line or ("=DIRECTORY" in line and "hf download" in line)
        assert "hardware.build=tiny" in line


@pytest.mark.parametrize("word", ["hardware=cpu_tiny", "reward.placement=http"])
def test_a_tiny_build_and_a_service_need_no_weights(word: str, hub: Path) -> None:
    require_weights(config.load([f"reward={LEARNED[0]}", "data=signs", word]).settings.tree.reward)


def test_weights_in_a_directory_or_in_the_hub_cache_are_there(tmp_path: Path, hub: Path) -> None:
    path = "reward.rewards.pickscore.scorer.path"
    require_weights(config.load(["reward=pickscore", f"{path}={tmp_path}"]).settings.tree.reward)
    with pytest.raises(ValueError, match="there is no such file or directory"):
        require_weights(
            config.load(["reward=pickscore", f"{path}={tmp_path}/none"]).settings.tree.reward
        )
    commit = "0" * 40
    repository = hub / "models--yuvalkirstain--PickScore_v1"
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    reward = config.load(["reward=pickscore"]).settings.tree.reward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(hub))
        require_weights(reward)


def test_statistics_of_the_evaluation_need_weights_too(tmp_path: Path, hub: Path) -> None:
    words, path = (
        ["reward=jpeg", "data=signs", "callbacks=clip"],
        "callbacks.evaluation.statistics.0.path",
    )
    with pytest.raises(
        ValueError,
        match=f"^{path} = openai/.* of statistic ClipStatistics are not here.*hf download",
    ):
        require_weights({}, config.load(words).settings.tree.callbacks)
    require_weights({}, config.load([*words, f"{path}={tmp_path}"]).settings.tree.callbacks)
    require_weights({}, config.load([*words, "hardware=cpu_tiny"]).settings.tree.callbacks)


@pytest.mark.processes
def test_the_command_refuses_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a\n")
    code = (
        "import sys; from digenrl.extensions.bench.cli.score import main; "
        f"code = main(['reward=pickscore', 'images={tmp_path}', "
        f"'prompts={tmp_path}/prompts.txt']); "
        "sys.exit(99 if 'torch' in sys.modules else code)"
    )
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "HF_HOME": str(tmp_path / "hf"),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert f"`hf download yuvalkirstain/PickScore_v1` (into {tmp_path}/hf/hub" in done.stderr


def test_prompts_are_checked_by_every_scorer_that_is_built_here() -> None:
    lines = [
        ("a.txt:1", Prompt("number one")),
        ("a.txt:2", Prompt("a horse")),
        ("a.txt:3", Prompt("x", target="3")),
    ]
    digits = config.load(["reward=digits"]).settings.tree.reward
    assert [line.partition(": prompt")[0] for line in unscorable_prompts(digits, lines)] == [
        "a.txt:2: reward judge_a cannot score it",
        "a.txt:2: reward judge_b cannot score it",
    ]
    assert len(unscorable_prompts(digits, lines[1:2] * 30)) == 21
    assert len(unscorable_prompts(digits, lines[1:2] * 10)) == 20
    assert unscorable_prompts(config.load(["reward=jpeg"]).settings.tree.reward, lines) == []
    assert (
        unscorable_prompts(
            config.load(["reward=digits", "reward.placement=http"]).settings.tree.reward, lines
        )
        == []
    )
    broken = {"rewards": {"judge_a": {"scorer": {"_target_": "reward_models.absent.Judge"}}}}
    with pytest.raises(ValueError, match="reward judge_a: "):
        unscorable_prompts(broken, lines)


@pytest.mark.parametrize("entries", [3, "x", ["a"], True])
@pytest.mark.parametrize("group", ["rewards", "heldout"])
def test_a_group_that_is_no_group_is_named(group: str, entries: object) -> None:
    with pytest.raises(ValueError, match=rf"^reward\.{group} = "):
        list(placed_scorers({group: entries}))
