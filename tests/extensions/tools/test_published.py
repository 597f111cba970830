"""Published prompt sets: known by git's own id of their content, and used without what is held
out."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from digenrl.extensions.tools.cli import fetch as command
from digenrl.extensions.tools.published import SETS, PublishedSet, PublishedSource, blob_id
from digenrl.prompts import read_prompt_file

TRAIN, TEST = "a cat\na dog\na cat\na bird\n", "a dog\na fish\n"


def published(folder: Path) -> PublishedSet:
    """A set of two files that lie in `folder`, by the ids that git gives them."""
    sources = []
    for name, text in (("train.txt", TRAIN), ("test.txt", TEST)):
        (folder / name).write_text(text)
        told = subprocess.run(
            ["git", "hash-object", str(folder / name)], capture_output=True, text=True, check=True
        )
        sources.append(
            PublishedSource("somebody/prompts", "0" * 40, f"data/{name}", told.stdout.strip())
        )
    return PublishedSet(*sources)


def test_a_published_set_is_checked_and_what_is_held_out_is_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("prompts", "mine")
    folder.mkdir(parents=True)
    monkeypatch.setitem(SETS, "mine", published(folder))
    assert blob_id(folder / "train.txt") == SETS["mine"].train.blob
    assert command.main(["prompts=mine"]) == 0
    out, told = capsys.readouterr()
    train, heldout = (word.partition("=")[2] for word in out.splitlines()[-1].split())
    assert [record.text for record in read_prompt_file(train).prompts] == ["a cat", "a bird"]
    assert heldout == str(folder / "test.txt")
    assert "as published, 3 prompts and 1 repeated" in told
    assert "without what is held out, 1 fewer" in told

    (folder / "train.txt").write_text(TRAIN + "a lorry\n")
    assert command.main(["prompts=mine"]) == 2
    assert "not the published file" in capsys.readouterr().err
    assert command.main(["prompts=mine", "list=true"]) == 0
    address = "https://raw.githubusercontent.com/somebody/prompts/" + "0" * 40 + "/data/train.txt"
    assert f"curl -fL --create-dirs -o {folder / 'train.txt'} {address}" in capsys.readouterr().out


def test_a_mistyped_set_is_told_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["prompts=picscore"]) == 2
    assert "prompts = picscore: no such set; there are pickscore, ocr" in capsys.readouterr().err
