from __future__ import annotations

import pytest
import torch

from digenrl.types import Prompt
from reward_models.video_quality import VideoQuality, quality_terms


def moving_bar(step: float) -> torch.Tensor:
    """[1, 9, 3, 32, 32]: a soft vertical wave that moves `step` pixels a frame."""
    x = torch.arange(32.0)
    frames = [0.5 + 0.4 * torch.sin((x - step * f) * 0.4) for f in range(9)]
    return torch.stack(frames).view(1, 9, 1, 1, 32).expand(1, 9, 3, 32, 32)


NOISE = torch.rand(1, 9, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_terms_order_frozen_smooth_and_flickering_videos():
    frozen, smooth, noise = (
        quality_terms(video) for video in (moving_bar(0), moving_bar(1), NOISE)
    )
    assert frozen["motion"] == 0
    assert frozen["smoothness"] == 1
    assert smooth["motion"] > 0.5
    assert smooth["smoothness"] > 0.6 > noise["smoothness"]


def test_blur_and_clipping_lower_their_terms():
    flat, black = torch.full((1, 3, 16, 16), 0.5), torch.zeros(1, 3, 16, 16)
    assert quality_terms(flat)["sharpness"] == 0
    assert quality_terms(NOISE[:, 0])["sharpness"] > 0.5
    assert (quality_terms(flat)["exposure"], quality_terms(black)["exposure"]) == (1, 0)


def test_score_is_the_weighted_mean_and_missing_without_a_term():
    prompts = [Prompt("a")]
    terms = quality_terms(moving_bar(1))
    expected = (3 * terms["sharpness"] + terms["motion"]) / 4
    torch.testing.assert_close(VideoQuality(3, 0, 0, 1)(moving_bar(1), prompts), expected)
    assert torch.isnan(VideoQuality(0, 0, 1, 1)(NOISE[:, 0], prompts)).all()
    with pytest.raises(ValueError, match="non-negative"):
        VideoQuality(0, 0, 0, 0)
