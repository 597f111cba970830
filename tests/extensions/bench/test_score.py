"""`make score`: the command in this process, one reward after another."""

from __future__ import annotations

import json
import re
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from digenrl.extensions.bench.cli.score import main

pytestmark = pytest.mark.heavy

WORDS = ["HELLO", "Open Now", "BAKERY"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """pictures/ with three signs and what must be ignored, prompts.txt; the working directory."""
    monkeypatch.chdir(tmp_path)
    pictures = tmp_path / "pictures of (mine), 1"
    pictures.mkdir()
    for name, word in zip("cab", ["BAKERY", "HELLO", "Open Now"], strict=True):
        image = Image.new("RGB", (256, 128), "white")
        ImageDraw.Draw(image).text(
            (128, 64), word, fill="black", font=ImageFont.load_default(36), anchor="mm"
        )
        image.save(pictures / f"{name}.png")
    (pictures / "notes.txt").write_text("x")
    (pictures / "sub.png").mkdir()
    (tmp_path / "prompts.txt").write_text("".join(f'a sign "{word}"\n' for word in WORDS))
    return tmp_path


def run(folder, capsys, *words, images="pictures of (mine), 1", prompts="prompts.txt"):
    code = main([*words, f"images={images}", f"prompts={prompts}"])
    return code, capsys.readouterr()


def test_files_by_name_against_lines_in_order(folder, capsys):
    code, output = run(folder, capsys, "reward=ocr")
    assert code == 0
    written = Path(output.out.splitlines()[-1])
    assert written.parent == folder / "outputs" / "scores"
    scores = json.loads(written.read_text())["scores"]
    assert [(row["file"], row["prompt"]) for row in scores] == [
        (f"{name}.png", f'a sign "{word}"') for name, word in zip("abc", WORDS, strict=True)
    ]
    assert all(row["score"] >= 0.9 for row in scores)


def test_a_mixture_shows_its_rewards_and_the_weighted_sum(folder, capsys):
    code, output = run(
        folder, capsys, "reward=ocr_clip", "hardware.build=tiny", "heldout=true", "output=a.json"
    )
    assert code == 0
    assert "clip_score" in output.out
    for row in json.loads((folder / "a.json").read_text())["scores"]:
        assert set(row["rewards"]) == {"ocr", "clip_score", "picture_quality"}
        assert row["score"] == pytest.approx(
            row["rewards"]["ocr"] + 0.5 * row["rewards"]["clip_score"]
        )


def test_videos_and_pictures_of_other_sizes_are_scored_together(folder, capsys):
    pictures = folder / "pictures of (mine), 1"
    frames = np.random.default_rng(0).integers(0, 255, (6, 32, 32, 3), dtype=np.uint8)
    imageio.imwrite(pictures / "d.mp4", frames, fps=6, macro_block_size=1)
    Image.fromarray(frames[0]).convert("L").save(pictures / "e.jpg")
    (folder / "prompts.txt").write_text("same\n" * 5)
    code, output = run(folder, capsys, "reward=video_quality")
    assert code == 0
    scores = json.loads(Path(output.out.splitlines()[-1]).read_text())["scores"]
    assert [row["file"] for row in scores] == ["a.png", "b.png", "c.png", "d.mp4", "e.jpg"]
    assert all(0 <= row["score"] <= 1 for row in scores)


@pytest.mark.parametrize("name", ["bomb.mp4", "bomb.gif", "bomb.png"])
def test_a_file_of_too_many_pixels_is_refused_before_they_are_decoded(folder, capsys, name):
    """A few KB that would become 16 frames of 512 x 512, and a picture of 2048 x 2048."""
    bombs = folder / "bombs"
    bombs.mkdir()
    if name.endswith("png"):
        Image.new("RGB", (2048, 2048)).save(bombs / name)
    else:
        imageio.imwrite(
            bombs / name, np.random.default_rng(0).integers(0, 2, (16, 512, 512, 3), dtype=np.uint8)
        )
    (folder / "prompts.txt").write_text("x\n")
    code, output = run(folder, capsys, "reward=video_quality", "max_pixels=1048576", images="bombs")
    assert code == 1
    assert f"{name}: cannot be read as a picture or video" in output.err
    assert "max_pixels = 1048576: " in output.err
    if name.endswith("mp4"):
        words = ("reward=video_quality", "max_pixels=1048576", "max_frames=4")
        assert run(folder, capsys, *words, images="bombs")[0] == 0


def test_files_are_held_up_to_the_pixels_allowed(folder, capsys):
    """Three pictures of 256 x 128 where one and a half may be held: they are scored one by one, all
    the same."""
    alone = run(folder, capsys, "reward=jpeg", "max_pixels=49152", "output=a.json")
    together = run(folder, capsys, "reward=jpeg", "output=b.json")
    assert (alone[0], together[0]) == (0, 0)
    assert (folder / "a.json").read_text() == (folder / "b.json").read_text()


def test_a_prompt_without_a_target_is_named_by_line(folder, capsys):
    (folder / "prompts.txt").write_text('a sign "HELLO"\n\nno quotes\na sign "x"\n')
    code, output = run(folder, capsys, "reward=ocr")
    assert code == 1
    assert "prompts.txt:3: " in output.err
    assert "'no quotes'" in output.err
    assert not (folder / "outputs").exists()


def test_grey_pictures_keep_their_one_channel(folder, capsys):
    digits = folder / "digits"
    digits.mkdir()
    Image.new("L", (8, 8), 200).save(digits / "a.png")
    (folder / "prompts.txt").write_text("3\n")
    assert run(folder, capsys, "reward=digits", images="digits")[0] == 0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ({"reward": "reward=orc"}, 2, "there is no such reward"),
        ({"reward": "reward=orc"}, 2, "video_quality"),
        ({"reward": ""}, 2, "reward=... is missing; known: aesthetic"),
        ({"images": "nowhere"}, 1, "nowhere: no such folder"),
        ({"images": "."}, 1, "holds no picture or video"),
        ({"prompts": "none.txt"}, 1, "none.txt: no such prompt file"),
        ({"extra": "imges=x"}, 2, "nearest: images"),
        ({"extra": "--fast"}, 2, "settings are key=value"),
        ({"extra": "reward.rewards.ocr.scorer.frmes=2"}, 2, "frmes"),
        ({"extra": "reward.rewards.ocr.scorer._target_=os.system"}, 2, "refused"),
        (
            {"extra": "reward.rewards.ocr.scorer.recognition_only=perhaps"},
            1,
            "auto, always or never",
        ),
        ({"extra": "reward.placement=thred"}, 1, "known: inline"),
        ({"lines": 2}, 1, "3 pictures or videos, prompts.txt 2 prompts"),
        ({"broken": True}, 1, "a.png: cannot be read"),
    ],
)
def test_mistakes_are_explained_without_a_traceback(folder, capsys, words, code, message):
    if "lines" in words:
        (folder / "prompts.txt").write_text('"a"\n"b"\n')
    if "broken" in words:
        (folder / "pictures of (mine), 1" / "a.png").write_bytes(b"no picture")
    given = [word for word in (words.get("reward", "reward=ocr"), words.get("extra")) if word]
    paths = {key: words[key] for key in ("images", "prompts") if key in words}
    got, output = run(folder, capsys, *given, **paths)
    assert got == code
    assert message in output.err
    assert "Traceback" not in output.err
    assert not (folder / "outputs").exists()


def test_a_missing_path_is_asked_for(capsys):
    assert main(["reward=ocr"]) == 2
    error = capsys.readouterr().err
    assert "images: a value is required; set images=..." in error
    assert "prompts: a value is required; set prompts=..." in error
    assert main(["--help"]) == 0


@pytest.mark.parametrize("output", [".", "prompts.txt/scores.json", "/proc/version/a.json"])
def test_an_output_that_cannot_be_written_is_refused_before_scoring(folder, capsys, output):
    code, said = run(folder, capsys, "reward=jpeg", f"output={output}")
    assert code == 1
    assert re.search(r"output = /\S+: cannot be written; name a file", said.err), said.err
    assert said.out == ""
