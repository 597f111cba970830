"""Commands that are printed for the user's shell: it reads them with every word of the user's."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from digenrl.config import commands, load
from tests.conftest import ROOT

RUN = Path("/tmp/Übungen & co/it's 50 $x/run-0")
WORDS = [f"output_root={RUN}", "allow_targets=[a,b]", "model.path='a b'"]


@pytest.fixture
def shell(tmp_path: Path) -> str:
    """A virtual environment whose python prints its arguments, one a line, as make's VENV."""
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    (tmp_path / ".stamp").touch()
    return f"VENV={tmp_path}"


def in_shell(command: str, *more: str) -> list[str]:
    # `make test` hands its own words and level to a make below it, which then prints where it is.
    usual = {
        key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))
    }
    done = subprocess.run(
        ["bash", "-c", f"{command} {shlex.join(more)}"],
        cwd=ROOT, env=usual, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_shell_reads_what_is_printed(monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    words = ["experiment=scenes_flowgrpo", "hardware=cpu", *WORDS]
    monkeypatch.delenv("DIGENRL_CALLER", raising=False)
    typed = commands.shell_command("resume", WORDS, RUN).removeprefix("digenrl ")
    assert in_shell(f"printf '%s\\n' {typed}") == ["resume", str(RUN), *WORDS]
    monkeypatch.setenv("DIGENRL_CALLER", "make")
    made = in_shell(commands.shell_command("resume", WORDS, RUN), shell)
    assert made == ["-m", "digenrl.cli.train", f"resume={RUN}", *WORDS]
    assert in_shell(commands.shell_command("train", words), shell)[2:] == words


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"RUN": "a b/ä"}, ["join", "run=a b/ä"]),
        ({"RUN": "a b/ä"}, ["report", "run=a b/ä"]),
        ({"RUN": "a b/ä", "DATA": "ö p.txt"}, ["eval", "run=a b/ä", "data=ö p.txt"]),
        ({"RUN": "a b/ä", "SUITE": "scenes"}, ["benchmark", "run=a b/ä", "suite=scenes"]),
        ({"RUN": "a b/ä", "FORMAT": "kohya"}, ["export", "run=a b/ä", "format=kohya"]),
        (
            {"REWARD": "ocr", "IMAGES": "é f", "PROMPTS": "g h.txt"},
            ["score", "reward=ocr", "images=é f", "prompts=g h.txt"],
        ),
    ],
)
def test_makes_targets_take_any_path(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, str], words: list[str], shell: str
) -> None:
    # What `make test ARGS=...` gives to all that it starts.
    for name in ("ARGS", "MAKEFLAGS", "MAKEOVERRIDES"):
        monkeypatch.setenv(name, "")
    made = in_shell("make", words[0], *(f"{key}={value}" for key, value in asked.items()), shell)
    assert made == ["-m", "digenrl", *words]


def test_a_path_of_the_command_line_may_have_any_letters(tmp_path: Path) -> None:
    directory = tmp_path / "Übung 1/été"
    assert load([f"output_root={directory}"]).run_dir.is_relative_to(directory)


def test_a_run_is_continued_with_what_counts_on_the_command_line_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("allow_targets: [mine, other]\nconfirm_hosts: []\n")
    words = shlex.split(commands.to_continue(tmp_path, "max_rl_steps=8"))
    assert words[-3:] == [str(tmp_path), "allow_targets=[mine,other]", "max_rl_steps=8"]


def test_no_printed_command_allows_what_a_foreign_run_asks_for(tmp_path: Path) -> None:
    asked = "allow_targets: [os]\nconfirm_hosts: ['evil.example:1']\n"
    (tmp_path / "config.yaml").write_text(asked + "model: {attention_backend: flash_hub}\n")
    for given in ({}, {"allow_targets": [], "confirm_hosts": []}):
        assert shlex.split(commands.to_continue(tmp_path, given=given))[-1] == str(tmp_path)
    given = {"allow_targets": ["mine"]}
    assert "allow_targets=[mine]" in commands.to_continue(tmp_path, given=given)
