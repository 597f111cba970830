"""Scorers on a CLIP, through the tiny build: a random checkpoint of the real class, loaded by the
real code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessor

from digenrl.types import Prompt
from reward_models.aesthetic import Aesthetic, AestheticHead
from reward_models.clip_backbone import ClipBackbone, clip_pixels
from reward_models.clip_score import ClipScore
from reward_models.pickscore import PickScore
from reward_models.weights import make_clip

pytestmark = pytest.mark.heavy

PROMPTS = [Prompt("a red fox"), Prompt("Zürich 東京 🦊"), Prompt("x" * 400)]
MEDIA = torch.rand(3, 3, 40, 56, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def clip_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("clip")
    torch.manual_seed(5)
    make_clip(directory)
    return directory


@pytest.mark.parametrize("scorer", [ClipScore, PickScore, Aesthetic])
def test_images_videos_and_grey_are_scored_alike_in_every_build(scorer):
    score = scorer(build="tiny", device="cpu")
    images = score(MEDIA, PROMPTS)
    assert images.shape == (3,)
    assert torch.isfinite(images).all()
    assert images.unique().numel() == 3
    torch.testing.assert_close(score(MEDIA[:, None].expand(3, 9, 3, 40, 56), PROMPTS), images)
    assert torch.isfinite(score(MEDIA[:, :1], PROMPTS)).all()
    again = scorer(build="tiny", device="cpu")
    assert torch.equal(again(MEDIA, PROMPTS), images)
    assert again.weights_digest == score.weights_digest


def test_real_build_loads_a_directory(clip_directory):
    scorer = ClipScore(path=str(clip_directory), build="real", device="cpu")
    scores = scorer(MEDIA, PROMPTS)
    backbone = scorer.clip
    cosines = (backbone.images(MEDIA) * backbone.texts([prompt.text for prompt in PROMPTS])).sum(1)
    torch.testing.assert_close(scores, cosines)
    assert (scores.abs() <= 1).all()
    assert scorer.weights_digest != ClipScore(build="tiny", device="cpu").weights_digest


def test_pickscore_is_the_scaled_cosine(clip_directory):
    pick = PickScore(path=str(clip_directory), device="cpu")
    cosines = ClipScore(path=str(clip_directory), device="cpu")(MEDIA, PROMPTS)
    torch.testing.assert_close(pick(MEDIA, PROMPTS), cosines * pick.clip.logit_scale / 26)


def test_aesthetic_head_comes_from_a_weights_only_file(clip_directory, tmp_path):
    head = AestheticHead(16)
    torch.save(head.state_dict(), tmp_path / "head.pth")
    scorer = Aesthetic(path=str(clip_directory), head=str(tmp_path / "head.pth"), device="cpu")
    expected = head.eval()(scorer.clip.images(MEDIA)) / 10
    torch.testing.assert_close(scorer(MEDIA, PROMPTS), expected)
    with pytest.raises(ValueError, match="needs `head`"):
        Aesthetic(path=str(clip_directory))
    with pytest.raises(FileNotFoundError, match=r"No weights at .*none\.pth: give `head`"):
        Aesthetic(path=str(clip_directory), head=str(tmp_path / "none.pth"), device="cpu")


def test_pixels_equal_the_reference_preprocessing():
    processor = CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    smooth = torch.nn.functional.interpolate(MEDIA, scale_factor=3.0, mode="bilinear")
    quantised = smooth.mul(255).round()
    pictures = [Image.fromarray(p.permute(1, 2, 0).numpy().astype(np.uint8)) for p in quantised]
    expected = processor(pictures, return_tensors="pt").pixel_values
    torch.testing.assert_close(clip_pixels(quantised / 255, 32), expected, atol=0.03, rtol=0)


def test_an_unknown_build_is_refused():
    with pytest.raises(ValueError, match="real, tiny"):
        ClipBackbone(None, "small")
    with pytest.raises(ValueError, match="needs `path`"):
        ClipBackbone(None, "real")
