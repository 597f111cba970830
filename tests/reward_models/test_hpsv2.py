from __future__ import annotations

import pytest
import torch

from digenrl.types import Prompt
from reward_models.hpsv2 import HPSv2

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
