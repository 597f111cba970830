"""`digenrl new`: what it writes runs as it stands, with its own test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from digenrl import config
from digenrl.extensions.tools.cli.new import KINDS, main

REFUSED = {
    "kind": (["rewrad", "bright"], "kind = rewrad: there is none; nearest: reward"),
    "name": (["reward", "Bright-ness"], "name = Bright-ness: becomes a module and a key"),
    "an option's name": (["reward", "ocr"], "there is a reward or a Python module of that name"),
    "a module's name": (["reward", "json"], "there is a reward or a Python module of that name"),
    "nothing": ([], "kind: missing"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_made_is_refused(
    words: list[str], message: str, tmp_path: Path, capsys: object
) -> None:
    assert main([*words, f"out={tmp_path}"]) == 2
    assert message in capsys.readouterr().err  # type: ignore[attr-defined]
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_its_own_test_passes_and_nothing_is_overwritten(
    kind: str, tmp_path: Path, capsys: object
) -> None:
    assert main([kind, "my_own", f"out={tmp_path}"]) == 0
    assert "digenrl " in capsys.readouterr().out  # type: ignore[attr-defined]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_own.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert main([kind, "my_own", f"out={tmp_path}"]) == 2
    assert "exists; choose another name" in capsys.readouterr().err  # type: ignore[attr-defined]


def test_the_other_reward_of_a_new_experiment_counts_without_its_comment_sign(
    tmp_path: Path,
) -> None:
    assert main(["experiment", "my_own", f"out={tmp_path}"]) == 0
    file = tmp_path / "configs" / "experiment" / "my_own.yaml"
    skeleton = file.read_text(encoding="utf-8")
    file.write_text(skeleton.replace("# - override", "- override"), encoding="utf-8")
    words = ["--config-dir", str(tmp_path / "configs"), "experiment=my_own"]
    assert "jpeg_size" in config.load(words).settings.node_at("reward").rewards
