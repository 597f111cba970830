"""Statistics on CLIP features: their closed forms, what moves them, and that they keep to rank zero
and to CLIP."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.utils import save_image

from digenrl.types import Prompt
from reward_models.clip_backbone import ClipBackbone
from reward_models.clip_statistics import ClipStatistics
from reward_models.weights import make_clip
from tests.strategy.processes import TINY
from tests.training import commands

running = pytest.fixture(commands)
PROMPTS = [Prompt(text) for text in ("a fox", "a pond") for _ in range(3)]
MEDIA = torch.rand(6, 3, 40, 48, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint directory of the real format."""
    directory = tmp_path_factory.mktemp("clip")
    make_clip(directory)
    return str(directory)


def squared_mmd(x: Tensor, y: Tensor) -> float:
    """Unbiased, kernel (cosine + 1)^3, by the definition: sets of one size m."""
    m, kernel = len(x), lambda a, b: (1 + float(a @ b)) ** 3
    within = sum(kernel(s[i], s[j]) for s in (x, y) for i in range(m) for j in range(m) if i != j)
    return within / (m * (m - 1)) - 2 * sum(kernel(a, b) for a in x for b in y) / m**2


@pytest.mark.heavy
def test_the_numbers_are_their_closed_forms_and_take_no_random_number(
    clip: str, tmp_path: Path
) -> None:
    reference = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    for number, picture in enumerate((reference * 255).round() / 255):
        save_image(picture, tmp_path / f"{number}.png")
    state = torch.get_rng_state()
    measured = ClipStatistics(clip, reference=str(tmp_path), device="cpu")
    found = measured(MEDIA, PROMPTS)
    assert torch.equal(torch.get_rng_state(), state)
    backbone = ClipBackbone(clip, "real", "cpu")
    ours, theirs = backbone.images(MEDIA), backbone.images((reference * 255).round() / 255)
    pairs = [
        1 - float(ours[i] @ ours[j]) for i, j in ((0, 1), (0, 2), (1, 2), (3, 4), (3, 5), (4, 5))
    ]
    assert found["clip_diversity"] == pytest.approx(sum(pairs) / 6, abs=1e-6)
    assert found["clip_kid"] == pytest.approx(squared_mmd(ours, theirs), abs=1e-4)
    assert measured(MEDIA, PROMPTS) == found

    collapsed = measured(MEDIA[[0, 0, 0, 3, 3, 3]], PROMPTS)
    assert collapsed["clip_diversity"] == pytest.approx(0.0, abs=1e-5)
    assert math.isnan(measured(MEDIA[::3], PROMPTS[::3])["clip_diversity"])


@pytest.mark.heavy
def test_a_runs_first_pictures_are_a_reference_for_videos_and_images(tmp_path: Path) -> None:
    """The tiny build's numbers say that they are."""
    videos = MEDIA[:, None].expand(6, 5, 3, 40, 48)
    for media, rows in ((MEDIA, 6), (videos, 24)):
        first = (media * 255).round().to(torch.uint8)
        np.savez_compressed(tmp_path / "eval-0.npz", media=first.numpy())
        found = ClipStatistics(build="tiny", reference=str(tmp_path / "eval-0.npz"), device="cpu")(
            first / 255, PROMPTS
        )
        assert set(found) == {"tiny/clip_diversity", "tiny/clip_kid"}
        assert (
            -16 / rows < found["tiny/clip_kid"] < 0
        )  # unbiased: equal sets are below 0, by at most 2 max(kernel) / m


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "build='real', path=None"),
        ({"build": "small"}, "build='small'"),
        (
            {"build": "tiny", "reference": "nowhere"},
            "reference=nowhere holds fewer than two pictures",
        ),
        ({"build": "tiny", "max_reference": 1}, "max_reference=1"),
    ],
)
def test_bad_input_is_refused_before_clip_is_loaded(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ClipStatistics(**arguments)


@pytest.mark.slow
@pytest.mark.processes
def test_rank_zero_of_two_trainers_measures_alone(running: Any) -> None:
    tiny = [word for word in TINY if not word.startswith(("callbacks=", "~callbacks"))]
    words = [
        "hardware=cpu_tiny",
        "callbacks=clip",
        "callbacks.evaluation.max_prompts=3",
        "allocation.trainers=2",
    ]
    run = running(*words, "max_rl_steps=1", tiny=tiny, fork=True)
    assert run.finish() == 0, run.stderr
    lines = [row for row in run.rows("metrics.jsonl") if row["kind"] == "eval"]
    assert [line["rl_step"] for line in lines] == [0, 1]
    assert all(0 < line["tiny/clip_diversity"] < 2 for line in lines)
