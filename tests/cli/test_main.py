"""`digenrl`: each command by its name, the run as a plain word, and what is no command."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from digenrl.cli import main as command
from digenrl.cli.commands import all_commands
from tests.conftest import ROOT


def exit_code(words: list[str]) -> object:
    """What the process would end with."""
    try:
        return command.main(words)
    except SystemExit as left:
        return left.code


def test_it_is_installed_under_that_name(repository: Path) -> None:
    scripts = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["digenrl"].partition(":")
    assert getattr(import_module(module), function) is command.main


@pytest.mark.parametrize("name", all_commands())
def test_every_command_is_there_and_has_a_page_of_its_own(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code([name, "--help"]) == 0
    assert f"digenrl {name}" in capsys.readouterr().out or name == "resume"  # a page of `train`


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "no such command; nearest: train"),
        (["resume"], "say which run, e.g. digenrl resume outputs/"),
        (["resume", "max_rl_steps=9"], "say which run"),
        (["eval", "rum=x"], "no run=... in rum=x; say which run"),
        (["resume", "nowhere"], "resume = "),
        (["report", "nowhere"], "run=nowhere"),
        (["eval", "nowhere"], "run = nowhere"),
        (["export", "nowhere", "weights=trained"], "run = "),
    ],
)
def test_what_does_not_fit_is_said(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.heavy
def test_the_working_directory_comes_last_among_the_places_of_modules(tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text(
        "raise SystemExit('a file of the working directory was imported')"
    )
    code = (
        "import sys; sys.path.remove(''); from digenrl.cli.main import main; "
        "sys.exit(main(['train', '--cfg']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "experiment_name: scenes_flowgrpo" in done.stdout


@pytest.mark.heavy
def test_too_little_address_space_is_said(tmp_path: Path) -> None:
    command = f"ulimit -v 1500000; exec {sys.executable} -m digenrl train output_root={tmp_path}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert "(ulimit -v)" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_before_a_command_has_begun_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("digenrl.cli.main.all_commands", lambda: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores it
    try:
        assert exit_code(["train"]) == 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "digenrl: stopped by SIGINT\n"


@pytest.mark.parametrize(
    "name", ["a=b", "run, x=1", "it's", "[1] (2)", "50% $HOME", "'quoted", "ü "]
)
@pytest.mark.parametrize("form", ["{}", "{}/", "./{}", "link", "link/", "run={}"])
def test_a_run_may_have_any_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    form: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    Path("link").symlink_to(name)
    word = form.format(name)
    exit_code(["report", word])
    said = capsys.readouterr().err
    # The directory is found, and said to hold no run.
    assert "say which run" not in said
    assert "no such directory" not in said
    assert "config.yaml" in said or "no run" in said or "holds" in said, said


def test_a_command_for_a_run_of_nobody_ends_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("report", "export", "eval", "resume"):
        found = subprocess.run(
            [sys.executable, "-m", "digenrl", name, "~nobody-here/run"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert found.returncode == 2, found.stderr
        assert "Traceback" not in found.stderr
        assert "~nobody-here" in found.stderr
