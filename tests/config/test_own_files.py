"""Options of the user's own, in a directory that is no checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from digenrl import config
from digenrl.cli.sweeps import expand_sweep
from digenrl.config.output_dir import prepare_run_dir
from digenrl.config.settings import Settings
from tests.deleting import installed

pytestmark = pytest.mark.heavy

EXPERIMENT = (
    "# @package _global_\ndefaults:\n  - digits_flowgrpo\n  - override /reward: "
    "flat\n\nmax_rl_steps: 3\n"
)
REWARD = """\
defaults: [_suite]
rewards:
  flat: {weight: 1.0, scorer: {_target_: reward_models.jpeg_size.JpegSize}}
"""
PLANNER = pytest.mark.skipif(not installed("planner"), reason="needs the extension")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A directory whose name Hydra's grammar would split."""
    directory = tmp_path / "it's [my] own, really"
    for path, text in (("experiment/mine.yaml", EXPERIMENT), ("reward/flat.yaml", REWARD)):
        (directory / path).parent.mkdir(parents=True)
        (directory / path).write_text(text)
    return directory


@pytest.mark.parametrize("form", ["--config-dir DIR", "--config-dir=DIR", "-cd DIR"])
@pytest.mark.parametrize("config_name", ["train", pytest.param("plan", marks=PLANNER)])
def test_an_experiment_of_ones_own_composes_with_a_reward_of_ones_own(
    form: str, config_name: str, own: Path
) -> None:
    words = [word.replace("DIR", str(own)) for word in form.split()]
    composed = config.load([*words, "experiment=mine"], config_name)
    assert (composed.settings.experiment_name, composed.settings.max_rl_steps) == ("mine", 3)
    assert list(composed.settings.tree.reward.rewards) == ["flat"]


def test_it_is_found_relative_to_the_working_directory(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own.parent)
    assert config.load(["--config-dir", own.name, "reward=flat"]).choices["reward"] == "flat"


def test_a_sweep_takes_it(own: Path) -> None:
    _, jobs = expand_sweep(
        config.loading.without_flags(["--config-dir", str(own), "experiment=mine", "seed=1,2"])[0]
    )
    assert [config.load(job.words).settings.max_rl_steps for job in jobs] == [3, 3]


def test_the_stored_run_needs_the_directory_no_more(own: Path, tmp_path: Path) -> None:
    run = prepare_run_dir(
        config.load(
            ["--config-dir", str(own), "experiment=mine", f"output_root={tmp_path / 'out'}"]
        )
    )
    for path in [*own.rglob("*.yaml")]:
        path.unlink()
    resumed = config.load([f"resume={run}", "max_rl_steps=5"]).settings
    assert (resumed.experiment_name, resumed.max_rl_steps, list(resumed.reward.rewards)) == (
        "mine",
        5,
        ["flat"],
    )


@pytest.mark.parametrize(
    ("file", "text", "words", "message"),
    [
        (
            "experiment/other.yaml",
            "# @package _global_\nmax_rl_step: 3\n",
            ["experiment=other"],
            "max_rl_steps",
        ),
        (
            "reward/ocr.yaml",
            REWARD,
            [],
            "reward/ocr.yaml has the name of an option that is there already",
        ),
        (
            "reward/flat.yaml",
            REWARD,
            ["reward=flatt"],
            "reward = flatt: there is no such reward; nearest: flat",
        ),
        (
            "experiment/other.yaml",
            EXPERIMENT.replace("flat", "flatt"),
            ["experiment=other"],
            "train: reward = flatt: there is no such reward; nearest: flat",
        ),
        (
            "reward/flat.yaml",
            REWARD.replace("reward_models.jpeg_size", "mine"),
            ["reward=flat"],
            r"allow_targets=\[mine",
        ),
    ],
)
def test_what_is_wrong_in_it_is_said(
    file: str, text: str, words: list[str], message: str, own: Path
) -> None:
    (own / file).write_text(text)
    with pytest.raises(config.ConfigError, match=message):
        config.load(["--config-dir", str(own), *words])


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        config.ConfigError, match=r"--config-dir .*nowhere: is no directory; name one with groups"
    ):
        config.load(["--config-dir", str(tmp_path / "nowhere")])


def test_the_configurations_of_the_checkout_are_no_names_taken_twice() -> None:
    """`digenrl new` in the checkout writes there, and prints a line with `--config-dir configs`."""
    words = ["--config-dir", str(config.config_directory()), "experiment=digits_flowgrpo"]
    assert config.load(words).settings == config.load(words[2:]).settings


OWN = "# @package _global_\ndefaults:\n  - digits_flowgrpo\n  - _self_\nmax_rl_steps: 7\n"


def load_own(folder: Path, name: str, content: bytes) -> Settings:
    """Return what an experiment of this name, with this content, makes of a run."""
    file = folder / "experiment" / f"{name}.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    words = [f"experiment={name}", "hardware=cpu_tiny", f"--config-dir={folder}"]
    return config.load(words).settings


@pytest.mark.parametrize("name", ["20261128", "2026-11-28", "1e3", "007", "true", "Inf", "my exp"])
def test_an_option_may_have_any_name(tmp_path: Path, name: str) -> None:
    settings = load_own(tmp_path, name, OWN.encode())
    assert (settings.max_rl_steps, settings.experiment_name) == (7, name)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (OWN.encode("utf-8-sig"), "is not UTF-8 without a byte order mark; save it so"),
        (OWN.encode("utf-16"), "is not UTF-8 without a byte order mark; save it so"),
        (b"# caf\xe9\n" + OWN.encode(), "is not UTF-8 without a byte order mark"),
        (f"{OWN}data:\n\xa0\xa0group_size: 4\n".encode(), "line 7 begins with a no-break space"),
        (OWN.partition("\n")[2].encode(), "first line be `# @package _global_`"),
        (b"", "first line be `# @package _global_`"),
        (b"- a\n", "first line be `# @package _global_`"),
        (OWN.replace("flow", "flwo").encode(), "nearest: digits_flowgrpo"),
    ],
)
def test_a_file_that_cannot_count_says_why(tmp_path: Path, content: bytes, expected: str) -> None:
    with pytest.raises(config.ConfigError) as caught:
        load_own(tmp_path, "mine", content)
    assert expected in caught.value.problems[0]
    assert "mine" in caught.value.problems[0] or "experiment" in caught.value.problems[0]
