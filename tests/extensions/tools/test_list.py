"""Names that can be found: `digenrl list`, what a refusal names as nearest, and what a run lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from digenrl import config
from digenrl.cli.main import main
from digenrl.config.compose import group_options
from digenrl.config.errors import nearest_name
from digenrl.config.shipped import config_directory
from digenrl.extensions.tools.cli.check import check_needs


def test_every_option_has_a_line_and_nothing_is_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "experiment"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = group_options(config_directory())["experiment"]
    assert [line.split()[0] for line in lines] == [f"experiment={name}" for name in names]
    assert all(len(line.split()) > 3 for line in lines)
    assert main(["list"]) == 0
    assert "wan21_flowgrpo" in capsys.readouterr().out


def test_options_of_your_own_are_listed_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward/mine.yaml").write_text("# What I like. And more.\nrewards: {}\n")
    assert main(["list", "reward", "--config-dir", str(tmp_path)]) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("reward=mine")]
    assert line.split(maxsplit=1)[1] == "What I like."
    assert main(["list", "rewards"]) == 2
    assert "nearest: reward" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("experiment=flux", "nearest: flux1_cps, flux1_dancegrpo, "),
        ("experiment=Wan21_FlowGRPO", "nearest: wan21_flowgrpo. "),
        ("schedule=GAP", "nearest: gap, "),
        ("experiment=zzz", "wan21_flowgrpo"),
        ("experment=wan21_flowgrpo", "nearest: experiment."),
        ("hardwear=cpu", "nearest: hardware"),
        ("SEED=3", "nearest: seed"),
    ],
)
def test_a_refusal_names_what_was_meant(word: str, said: str) -> None:
    with pytest.raises(config.ConfigError) as refused:
        config.load([word])
    assert said in str(refused.value)


def test_the_nearest_name_may_hold_what_was_asked() -> None:
    assert nearest_name("grpo", ["digits_flowgrpo", "flux1_dancegrpo", "x"]) == "digits_flowgrpo"
    assert nearest_name("gr", ["digits_flowgrpo"]) is None


@pytest.mark.heavy
def test_all_that_a_run_lacks_is_said_at_once_gpus_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    findings = list(check_needs(["experiment=flux1_flowgrpo", "hardware=node_8xh100"]))
    lacking = [(each.subject, each.text) for each in findings if each.level == "fix"]
    assert [subject for subject, _ in lacking] == ["GPUs", "model", "rewards"]
    assert "hf download black-forest-labs/FLUX.1-dev" in lacking[1][1]
    assert "hf download yuvalkirstain/PickScore_v1" in lacking[2][1]
    assert {each.level for each in check_needs(["experiment=digits_flowgrpo"])} == {"ok"}
    assert main(["check", "experiment=nowhere", "seeed=3"]) == 1
    said = capsys.readouterr().out
    assert "there is no such experiment" in " ".join(said.split())
