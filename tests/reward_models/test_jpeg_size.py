from __future__ import annotations

import torch

from digenrl.types import Prompt
from reward_models.jpeg_size import JpegSize

PROMPTS = [Prompt("a"), Prompt("b")]


def test_noise_is_larger_than_a_flat_picture():
    noise = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    media = torch.cat([torch.full((1, 3, 32, 32), 0.5), noise])
    small, large = JpegSize()(media, PROMPTS).tolist()
    assert 0 > small > large
    torch.testing.assert_close(
        JpegSize(maximise=True)(media, PROMPTS), torch.tensor([-small, -large])
    )


def test_grey_videos_are_scored_as_the_mean_of_their_frames():
    noise = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(2))
    flat = torch.zeros(1, 1, 16, 16)
    video = torch.stack([noise, flat], 1).expand(2, 2, 1, 16, 16)
    images = JpegSize()(torch.cat([noise, flat]), PROMPTS)
    torch.testing.assert_close(JpegSize()(video, PROMPTS), images.mean().expand(2))
