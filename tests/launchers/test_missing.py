"""A run that cannot start here lists everything that is missing, GPUs first, in the words of its
caller. The last line is a command that goes on."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from digenrl import config, devices
from digenrl.cli.extensions import choose_advisor
from digenrl.launchers.job import NotStarted, prepare_job


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let this machine have neither GPUs nor any weights."""
    monkeypatch.setattr(devices, "usable_gpus", lambda: ())
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))


def refused(words: list[str]) -> list[str]:
    with pytest.raises(NotStarted) as caught:
        prepare_job(config.load(words), choose_advisor())
    return str(caught.value).splitlines()


# Every pair of values: each row plans twice, and callers differ in words alone.
@pytest.mark.parametrize(
    ("experiment", "profile", "caller"),
    [
        ("wan21_flowgrpo", "", "make"),
        ("wan21_flowgrpo", "node_8xh100", "digenrl"),
        ("flux1_flowgrpo", "", "digenrl"),
        ("flux1_flowgrpo", "node_8xh100", "make"),
        ("sd35_pickscore", "", "make"),
        ("sd35_pickscore", "node_8xh100", "digenrl"),
    ],
)
def test_gpus_come_first_and_the_last_line_goes_on(
    monkeypatch: pytest.MonkeyPatch, experiment: str, profile: str, caller: str
) -> None:
    monkeypatch.setenv("DIGENRL_CALLER", caller)
    words = [f"experiment={experiment}", *([f"hardware={profile}"] if profile else [])]
    lines = refused(words)
    assert "missing here" in lines[0]
    assert lines[1].startswith("  - GPUs: ")
    said = "\n".join(lines)
    assert "  - model: " in said
    assert "allocation.trainers=" not in said, "no split of processors for a model of GPUs"
    assert "outgoing traffic" not in said
    assert "digenrl check" in said
    assert f"{caller} plan" in said
    other = {"make": "digenrl ", "digenrl": "make "}[caller]
    commands = [line.rpartition(": ")[2] for line in lines[-3:]]
    assert not [line for line in (commands[0], commands[2]) if line.startswith(other)]
    goes_on = shlex.split(lines[-1].rpartition("model: ")[2])
    assert goes_on[:2] == [caller, "train"]
    names = {"EXP": "experiment", "HW": "hardware"}
    given = [
        word.removeprefix("ARGS=").replace(key, names.get(key, key), 1)
        for word in goes_on[2:]
        for key in [word.partition("=")[0]]
    ]
    composed = config.load(given)
    assert composed.choices["experiment"] == experiment
    prepare_job(composed, choose_advisor())


def test_words_of_the_user_stay_in_the_command_that_goes_on() -> None:
    words = ["experiment=wan21_flowgrpo", "seed=7", "allocation.trainers=4", "data.group_size=8"]
    (*_, last) = refused([*words, "allocation.rollouts=4"])
    assert "seed=7" in last
    assert "data.group_size=8" in last
    assert "allocation" not in last


def test_missing_weights_alone_end_with_fetch() -> None:
    lines = refused(["experiment=digits_flowgrpo", "reward=hpsv2"])
    assert not [line for line in lines if "GPUs" in line]
    assert lines[-1].endswith("digenrl fetch experiment=digits_flowgrpo reward=hpsv2")


def test_a_fault_of_another_kind_is_said_alone(tmp_path: Path) -> None:
    words = ["experiment=digits_flowgrpo", "allocation.trainers=2", "network.interface=nowhere0"]
    lines = refused(words)
    assert "nowhere0" in lines[0]
    assert not any("missing here" in line for line in lines)
