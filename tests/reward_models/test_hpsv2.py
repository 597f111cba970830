from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from digenrl.types import Prompt
from reward_models.clip_backbone import CLIP_MEAN, CLIP_STD
from reward_models.hpsv2 import HPSv2, whole_pixels

pytestmark = pytest.mark.heavy

PROMPTS = [Prompt("a red fox"), Prompt("Zürich 東京 🦊"), Prompt("x " * 400)]
MEDIA = torch.rand(3, 3, 40, 56, generator=torch.Generator().manual_seed(0))


def test_the_tiny_build_scores_images_videos_and_grey():
    scorer = HPSv2(build="tiny", device="cpu")
    scores = scorer(MEDIA, PROMPTS)
    assert scores.unique().numel() == 3
    assert (scores.abs() <= 1).all()
    torch.testing.assert_close(scorer(MEDIA[:, None].expand(3, 6, 3, 40, 56), PROMPTS), scores)
    assert torch.isfinite(scorer(MEDIA[:, :1], PROMPTS)).all()
    assert scorer.weights_digest == HPSv2(build="tiny", device="cpu").weights_digest


def test_a_real_build_needs_its_checkpoint():
    with pytest.raises(ValueError, match="needs `path`"):
        HPSv2()


@pytest.mark.parametrize("size", [(64, 64), (50, 96), (96, 50), (416, 240), (7, 100), (224, 120)])
def test_the_whole_picture_is_read_as_published(size: tuple[int, int]) -> None:
    """Against Pillow's own resizing of 8-bit pictures, which the published code calls."""
    side = 56
    drawn = torch.rand(1, 3, 6, 9, generator=torch.Generator().manual_seed(1))
    picture = torch.nn.functional.interpolate(drawn, size, mode="bilinear").mul(255).round()
    image = Image.fromarray(picture[0].permute(1, 2, 0).to(torch.uint8).numpy(), "RGB")
    height, width = (round(each * side / max(size)) for each in size)
    wanted = Image.new("RGB", (side, side))
    small = image.resize((width, height), Image.Resampling.BICUBIC)
    wanted.paste(small, ((side - width) // 2, (side - height) // 2))
    found = whole_pixels(picture / 255, side)[0]
    mean, std = (torch.tensor(each)[:, None, None] for each in (CLIP_MEAN, CLIP_STD))
    shown = torch.from_numpy(np.array(wanted)).permute(2, 0, 1) / 255
    torch.testing.assert_close(found * std + mean, shown, atol=2 / 255, rtol=0)
