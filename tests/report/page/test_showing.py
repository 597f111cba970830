"""The gallery: which samples are shown, with which score, and as what."""

from __future__ import annotations

import base64
import io
import math
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest
from PIL import Image

from digenrl.report.page import gallery
from digenrl.report.page.gallery import Tile
from digenrl.report.page.html import render_page
from digenrl.report.page.showing import CHANGES, MOMENTS, samples_to_show
from digenrl.report.read_run import read_run
from digenrl.report.summary import build_summary


def evaluated(
    path: Path,
    steps: int,
    prompts: list[str],
    shape: tuple[int, ...] = (3, 8, 8),
    animated: bool = False,
) -> Path:
    """A run of `steps` evaluations; sample k of every prompt scores step + k/10 with `a`, which
    weighs 2, and `b`."""
    (path / "samples").mkdir(parents=True)
    (path / "config.yaml").write_text("reward: {rewards: {a: {weight: 2.0}}, heldout: {b: {}}}\n")
    rows = [(prompt, sample) for prompt in prompts for sample in range(2)]
    media = np.zeros((len(rows), *shape), np.uint8)
    for step in range(steps):
        media[:] = step
        score = np.array(
            [step * (1 + prompts.index(p)) + sample / 10 for p, sample in rows], np.float32
        )
        texts = np.array([prompt for prompt, _ in rows])
        more = {"sources": np.full((len(rows), *shape[-3:]), 200, np.uint8)} if animated else {}
        np.savez(
            path / "samples" / f"eval-{step * 10}.npz",
            media=media,
            prompts=texts,
            a=score,
            b=-score,
            **more,
        )
    return path


def test_the_same_sample_of_each_prompt_at_evenly_chosen_evaluations(tmp_path: Path) -> None:
    shown = samples_to_show(read_run(evaluated(tmp_path, 11, ["p" * 300, "q"])))
    assert shown is not None
    assert shown.steps == (0, 20, 40, 60, 80, 100)[:MOMENTS]
    (first, cells), (second, _) = shown.rows
    assert (first, second) == ("p" * 300, "q")  # whole
    assert [cell.score for cell in cells if cell] == [
        f"{2 * step / 10:.3f}" for step in shown.steps
    ]
    mime, _, data = str(cells[-1] and cells[-1].source).partition(";base64,")
    assert mime == "data:image/png"
    with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
        assert picture.size == (gallery.SMALLEST, gallery.SMALLEST)
        assert picture.convert("RGB").getpixel((5, 5)) == (10, 10, 10)


def test_best_worst_and_change_are_of_the_optimised_reward(tmp_path: Path) -> None:
    prompts = [f"prompt {number}" for number in range(20)]
    shown = samples_to_show(read_run(evaluated(tmp_path, 2, prompts)))
    assert shown is not None
    assert [cell.prompt for cell in shown.best[:2]] == ["prompt 19", "prompt 19"]
    assert [cell.prompt for cell in shown.worst[:2]] == ["prompt 0", "prompt 0"]
    assert float(shown.worst[0].score) < float(shown.worst[1].score) < float(shown.best[0].score)
    assert len(shown.changes) == 2 * CHANGES
    assert shown.changes[0] == ("prompt 19", "0.100", "40.100", "+40.000")
    assert shown.changes[-1][0] == "prompt 0"


@pytest.mark.heavy
@pytest.mark.parametrize("animated", [False, True], ids=["from text", "from images"])
def test_a_video_is_a_video_in_the_report(tmp_path: Path, animated: bool) -> None:
    run = read_run(evaluated(tmp_path, 1, ["<b>"], (5, 3, 15, 16), animated))
    shown = samples_to_show(run)
    page = render_page(run, build_summary(run), {})
    assert shown is not None
    assert shown.changes == ()
    assert page.count('<video src="data:video/mp4;base64,') == 3  # over time, best, worst
    assert "<b></b>" not in page
    assert "&lt;b&gt;" in page
    video = base64.b64decode(shown.best[0].source.partition(",")[2])
    frames = imageio.imread(video, extension=".mp4")
    assert frames.shape == (5, 16, 32 if animated else 16, 3)
    assert (frames[:, 5, 5] > 150).all() == animated
    assert (frames[:, 5, -5] < 50).all()


def test_missing_scores_are_neither_best_nor_worst() -> None:
    score = np.array([0.5, math.nan, 0.1, 0.9])
    assert gallery.extreme_rows(score, 9) == ([3], [2])
    assert gallery.extreme_rows(score[1:2], 9) == ([], [])
    assert gallery.score_caption(Tile(np.zeros((1, 8, 8), np.uint8), "p", math.nan)) == "no score"


@pytest.mark.parametrize(
    "shape", [(1, 8, 8), (3, 512, 900), (4, 3, 64, 64), (9, 3, 480, 832), (3, 2000, 10)]
)
def test_stills_have_a_reasonable_size(shape: tuple[int, ...]) -> None:
    image = gallery.still_image(np.zeros(shape, np.uint8))
    assert min(image.size) >= 1
    assert max(image.size) <= gallery.LARGEST * gallery.STRIP_FRAMES * 2
    assert max(image.size) >= gallery.SMALLEST


@pytest.mark.parametrize("shape", [(1, 1, 20_000), (3, 1, 5000), (1, 20_000, 1), (3, 2, 4000)])
def test_a_picture_of_a_few_rows_is_not_enlarged_without_bound(shape: tuple[int, ...]) -> None:
    image = gallery.still_image(np.zeros(shape, np.uint8))
    assert image.width * image.height <= max(shape[1] * shape[2], gallery.WIDEST**2)
    assert image.width <= max(shape[2], gallery.WIDEST)
