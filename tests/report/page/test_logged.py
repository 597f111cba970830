"""The pictures of evaluations in TensorBoard and W&B, read back from what the loggers wrote."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import wandb
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from digenrl.callbacks.loggers import Guarded
from digenrl.callbacks.wandb_logger import WandbLogger
from digenrl.report.page.logged import picture_logger
from tests.callbacks.test_evaluation import evaluated_edits
from tests.callbacks.test_records import history

PROMPTS = ("a fox",) * 3 + ("a very long prompt " * 9,) * 3 + ("unseen",) * 3
SCORES = {"r": np.arange(9, dtype=np.float32) / 10}
Show = Callable[[Logger, int], None]


def of_images(step: int) -> Show:
    media = (
        np.full((9, 3, 16, 16), step, np.uint8) + np.arange(9, dtype=np.uint8)[:, None, None, None]
    )
    return picture_logger(media, PROMPTS, SCORES, {"r": 1.0}, 2, 2, None)


def log(logger: Logger, run_dir: Path, *shown: Show) -> None:
    """Log pictures as a run does: from the logger's own thread, with an end."""
    guarded = Guarded(logger, "own", run_dir)
    for step, show in enumerate(shown):
        guarded.log_pictures(show, step)
    guarded.finalize("success")
    assert not (run_dir / "events.jsonl").exists()  # nothing failed


def test_tensorboard_has_each_prompt_at_every_step_and_the_best_and_worst(tmp_path: Path) -> None:
    log(TensorBoardLogger(tmp_path, name="t", version=""), tmp_path, of_images(10), of_images(20))
    events = EventAccumulator(str(tmp_path / "t"), size_guidance={"images": 0}).Reload()
    tags = events.Tags()["images"]
    assert tags == ["eval/00 a fox", f"eval/01 {PROMPTS[3][:40]}", "eval/best", "eval/worst"]
    first, second = events.Images(tags[0])
    assert (first.step, second.step) == (0, 1)
    with Image.open(io.BytesIO(second.encoded_image_string)) as sheet:
        tile = sheet.convert("RGB").getpixel((10, 30))
        assert tile == (20, 20, 20)
        assert sheet.width >= 2 * 96


def test_what_prompts_change_is_shown_beside_the_samples(tmp_path: Path) -> None:
    logger = Guarded(TensorBoardLogger(tmp_path, name="t", version=""), "own", tmp_path)
    evaluated_edits(tmp_path, logger)
    logger.finalize("success")
    events = EventAccumulator(str(tmp_path / "t"), size_guidance={"images": 0}).Reload()
    with Image.open(
        io.BytesIO(events.Images("eval/01 number two")[-1].encoded_image_string)
    ) as sheet:
        assert sheet.convert("RGB").getpixel((10, 40)) == (0, 0, 200)
        assert sheet.width >= 2 * 2 * 96


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))
    yield
    wandb.teardown()


@pytest.mark.heavy
@pytest.mark.usefixtures("offline")
def test_wandb_gets_pictures_with_score_and_prompt_and_videos_as_mp4(tmp_path: Path) -> None:
    media, scores = np.zeros((2, 5, 3, 16, 16), np.uint8), {"r": np.zeros(2, np.float32)}
    videos = picture_logger(media, ("moves",) * 2, scores, {"r": 1.0}, 1, 1, None)
    logger = WandbLogger(tmp_path)
    log(logger, tmp_path, of_images(10), videos)
    name = f"eval/01 {PROMPTS[3][:40]}/captions"
    deadline = time.monotonic() + 20.0  # W&B's own process writes the file
    while not (found := [row[name] for row in history(tmp_path / "wandb") if name in row]):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert found[0] == [f"0.300: {PROMPTS[3]}", f"0.400: {PROMPTS[3]}"]
    (media,) = tmp_path.glob("wandb/offline-run-*/files/media")
    assert len(list(media.rglob("*.png"))) == 2 * 2 + 2 * 2
    (video, *_) = media.rglob("*.mp4")
    assert video.read_bytes()[4:8] == b"ftyp"


def test_a_logger_without_pictures_is_left_alone(tmp_path: Path) -> None:
    log(CSVLogger(tmp_path, name="c", version=""), tmp_path, of_images(1))
