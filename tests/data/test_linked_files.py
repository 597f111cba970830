"""Prompt files that are links, as the hub's cache, DVC and git-annex make them."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from digenrl import prompts


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A folder of links to files whose names say nothing: a data set as the hub's cache has it."""
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    folder.mkdir(parents=True)
    (blobs / "9f86").write_text("one\ntwo\n")
    (blobs / "60ae").write_text('{"prompt": "edit it", "image": "first.png"}\n')
    Image.new("RGB", (8, 8), "red").save(blobs / "11aa", format="PNG")
    for name, blob in {"train.txt": "9f86", "edits.jsonl": "60ae", "first.png": "11aa"}.items():
        (folder / name).symlink_to(f"../../blobs/{blob}")
    return folder


def test_suffix_and_picture_folder_are_of_the_name_that_was_given(snapshot: Path) -> None:
    assert [prompt.text for prompt in prompts.read_prompt_file(snapshot / "train.txt").prompts] == [
        "one",
        "two",
    ]
    (edit,) = prompts.read_prompt_file(snapshot / "edits.jsonl").prompts
    assert Path(edit.images[0].path).name == "first.png"
    assert prompts.read_prompt_file(snapshot / "train.txt").path == snapshot / "train.txt"


def test_a_link_of_a_link_and_a_linked_folder_are_read_alike(
    snapshot: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").symlink_to(snapshot)
    (tmp_path / "mine.jsonl").symlink_to(tmp_path / "data" / "edits.jsonl")
    (tmp_path / "first.png").symlink_to(tmp_path / "data" / "first.png")
    for name in ("data/edits.jsonl", "mine.jsonl"):
        (edit,) = prompts.read_prompt_file(tmp_path / name).prompts
        assert edit.images[0].size > 0


def test_a_link_without_a_suffix_to_a_file_with_one_is_refused(
    snapshot: Path, tmp_path: Path
) -> None:
    (tmp_path / "train").symlink_to(snapshot / "train.txt")
    with pytest.raises(prompts.PromptFileError, match="unknown kind"):
        prompts.read_prompt_file(tmp_path / "train")
