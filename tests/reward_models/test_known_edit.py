"""Edits with a known result: the right one scores 1, an untouched copy 0, and spoiling the rest
costs preservation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from digenrl.data import load_prompts
from digenrl.rewards.protocol import source_images
from digenrl.types import Prompt
from reward_models.dino_similarity import DinoSimilarity
from reward_models.first_frame import FirstFrame
from reward_models.image_similarity import ImageSimilarity
from reward_models.known_edit import EditDone, EditKept

PROMPTS = load_prompts("edits.jsonl")[:6]
SIZE = torch.zeros(6, 3, 64, 64)


def test_the_right_result_a_copy_and_a_spoilt_background_are_told_apart() -> None:
    source, target = source_images(SIZE, PROMPTS), source_images(SIZE, PROMPTS, "target_image")
    spoilt = target.clone()
    spoilt[..., :4] = 0.0
    done, kept = EditDone(), EditKept()
    assert torch.equal(done(target, PROMPTS), torch.ones(6))
    assert torch.equal(done(source, PROMPTS), torch.zeros(6))
    assert torch.equal(kept(target, PROMPTS), torch.ones(6))
    assert torch.equal(kept(source, PROMPTS), torch.ones(6))
    assert (kept(spoilt, PROMPTS) < 0.95).all()
    assert (done((source + target) / 2, PROMPTS) - 0.5).abs().max() < 1e-5
    assert torch.equal(done(target.unsqueeze(1).expand(6, 3, 3, 64, 64), PROMPTS), torch.ones(6)), (
        "videos too"
    )


def test_a_video_begins_with_its_picture_or_does_not() -> None:
    source = source_images(SIZE, PROMPTS)
    video = torch.stack([source, 1.0 - source], dim=1)
    assert torch.equal(FirstFrame()(video, PROMPTS), torch.ones(6))
    assert (FirstFrame()(video.flip(1), PROMPTS) < 0.3).all()


def test_likeness_to_the_source_is_that_of_clip() -> None:
    scorer = ImageSimilarity(build="tiny")
    source = source_images(SIZE, PROMPTS)
    assert (scorer(source, PROMPTS) - 1.0).abs().max() < 1e-5
    assert (
        scorer(torch.rand(SIZE.shape, generator=torch.Generator().manual_seed(0)), PROMPTS) < 0.999
    ).all()


def test_places_count_that_may_not_change() -> None:
    """Without the features of the left half: half of the likeness, or all once the region says that
    it may change."""
    scorer = DinoSimilarity(build="tiny", patches=4)
    source = source_images(SIZE, PROMPTS)
    assert (scorer(source, PROMPTS) - 1.0).abs().max() < 1e-5
    features = scorer._features
    scorer._features = lambda pictures: (
        features(pictures) * torch.tensor([0.0, 0.0, 1.0, 1.0]).repeat(4)[:, None]
    )
    half = [
        replace(prompt, metadata={**prompt.metadata, "region": [0, 0, 0.5, 1]})
        for prompt in PROMPTS
    ]
    assert (scorer(source, PROMPTS) - 0.5).abs().max() < 1e-5
    assert (scorer(source, half) - 1.0).abs().max() < 1e-5
    noise = torch.rand(SIZE.shape, generator=torch.Generator().manual_seed(0))
    assert (scorer(noise, PROMPTS) < 0.49).all()
    for region, cause in (
        ([0, 0, 1], "give .left, top"),
        ([0, 0, 1, 1], "and a rest"),
        ([0.5, 0, 0.2, 1], "left < right"),
    ):
        with pytest.raises(ValueError, match=cause):
            DinoSimilarity.check_prompts([replace(PROMPTS[0], metadata={"region": region})])


def test_a_prompt_that_has_no_edit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has no image; name a file in the field image"):
        EditDone.check_prompts([Prompt("make it red")])
    source = PROMPTS[0].images[0]
    same = Prompt("make it red", images=(source, replace(source, role="target_image")))
    with pytest.raises(ValueError, match="nothing is to be changed"):
        EditKept.check_prompts([same])
