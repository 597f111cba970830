from __future__ import annotations

import pytest
import torch

from digenrl.types import Prompt
from reward_models import image_reward
from reward_models.image_reward import MEAN, STD, ImageReward, ImageRewardModel

pytestmark = pytest.mark.heavy

PROMPTS = [Prompt("a red fox"), Prompt("a blue fox"), Prompt("x" * 400)]
MEDIA = torch.rand(3, 3, 40, 56, generator=torch.Generator().manual_seed(0))


def test_the_tiny_build_scores_images_videos_and_grey():
    scorer = ImageReward(build="tiny", device="cpu")
    scores = scorer(MEDIA, PROMPTS)
    assert scores.unique().numel() == 3
    torch.testing.assert_close(scorer(MEDIA[:, None].expand(3, 6, 3, 40, 56), PROMPTS), scores)
    assert torch.isfinite(scorer(MEDIA[:, :1], PROMPTS)).all()
    assert scorer.weights_digest == ImageReward(build="tiny", device="cpu").weights_digest
    same = scorer(MEDIA[:1].expand(3, 3, 40, 56), PROMPTS)
    assert same.unique().numel() == 3, "the prompt counts"


def test_padding_does_not_count_and_the_score_is_normalised():
    scorer = ImageReward(build="tiny", device="cpu")
    words = scorer.tokenizer([PROMPTS[0].text], return_tensors="pt")
    raw = (
        scorer.model(scorer._pixels(MEDIA[:1]), words.input_ids, words.attention_mask) * STD + MEAN
    )
    torch.testing.assert_close(scorer(MEDIA[:1], PROMPTS[:1]) * STD + MEAN, raw)


def test_the_published_names_are_renamed_and_nothing_else_is_accepted(tmp_path, monkeypatch):
    names = set(ImageRewardModel("tiny").state_dict())
    published = {image_reward._rename(name, -1) for name in names}
    for expected in (
        "blip.visual_encoder.blocks.1.attn.qkv.weight",
        "blip.visual_encoder.blocks.0.norm2.bias",
        "blip.visual_encoder.patch_embed.proj.weight",
        "blip.visual_encoder.norm.weight",
        "blip.text_encoder.encoder.layer.0.crossattention.self.key.weight",
        "blip.text_encoder.embeddings.word_embeddings.weight",
        "mlp.layers.0.weight",
    ):
        assert expected in published
    assert {image_reward._rename(name) for name in published} == names
    with pytest.raises(ValueError, match=r"vae\.x is no tensor of ImageReward"):
        image_reward.renamed({"vae.x": torch.zeros(1)})
    with pytest.raises(ValueError, match="needs `path`"):
        ImageReward()
    # a tiny network stands for the real one, which takes ten seconds and is not filled here
    monkeypatch.setattr(image_reward, "ImageRewardModel", lambda build: ImageRewardModel("tiny"))
    with pytest.raises(FileNotFoundError, match=r"ImageReward\.pt"):
        ImageReward(path=str(tmp_path / "none.pt"))
