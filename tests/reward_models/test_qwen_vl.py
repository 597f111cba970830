"""The reward models on Qwen-VL, in random builds of the same classes. Tested are their pictures and
questions, the hidden states that their heads read, and the loading of published files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2VLForConditionalGeneration

from digenrl.data import load_prompts
from digenrl.rewards.protocol import RewardError
from digenrl.types import Prompt
from reward_models.edit_reward import EditReward
from reward_models.hpsv3 import HPSv3
from reward_models.qwen_vl import PIXELS, published_names, published_texts, renamed, write_tiny
from reward_models.video_align import NORM, VideoAlign

pytestmark = pytest.mark.heavy

FIXED: dict[str, Any] = {"build": "tiny", "device": "cpu", "dtype": "float32"}
PROMPTS = [Prompt("a red fox"), Prompt("a blue fox"), Prompt("x" * 90)]
MEDIA = torch.rand(3, 3, 40, 56, generator=torch.Generator().manual_seed(0))
EDITS = load_prompts("edits.jsonl")[:3]


@pytest.fixture(scope="module", params=[HPSv3, VideoAlign, EditReward])
def scorer(request: pytest.FixtureRequest) -> Any:
    return request.param(**FIXED)


def prompts_of(scorer: Any) -> list[Prompt]:
    """The prompts, with pictures where the scorer asks for them."""
    return [
        replace(prompt, images=edit.images) if isinstance(scorer, EditReward) else prompt
        for prompt, edit in zip(PROMPTS, EDITS, strict=True)
    ]


def test_the_score_depends_on_picture_and_prompt_alone(scorer: Any) -> None:
    prompts = prompts_of(scorer)
    scores = scorer(MEDIA, prompts)
    assert scores.shape == (3,)
    assert scores.unique().numel() == 3
    one = scorer(MEDIA[:1].expand(3, 3, 40, 56), prompts)
    assert one.unique().numel() == 3, "the prompt counts"
    assert scorer(MEDIA, prompts[:1] * 3).unique().numel() == 3, "the picture counts"
    for row, prompt in enumerate(prompts):  # neither its neighbours nor their lengths
        alone = scorer(MEDIA[row : row + 1], [prompt])
        torch.testing.assert_close(alone, scores[row : row + 1], rtol=1e-4, atol=1e-5)
    assert torch.isfinite(scorer(MEDIA[:, :1], prompts)).all()
    assert torch.isfinite(scorer(MEDIA[:, None].expand(3, 5, 3, 40, 56), prompts)).all()


def test_identity_names_weights_question_and_axes(scorer: Any) -> None:
    again = type(scorer)(**FIXED)
    assert (again.model_id, again.weights_digest) == (scorer.model_id, scorer.weights_digest)
    first = next(iter(scorer.default_axes))
    other = type(scorer)(**FIXED, axes={first: 2.0})
    assert other.model_id != scorer.model_id
    assert f"{first}=2" in other.model_id
    other.texts = ("else",)
    assert "question=" in scorer.model_id
    with pytest.raises(ValueError, match=r"axes names \['beauty'\]"):
        type(scorer)(**FIXED, axes={"beauty": 1.0})
    with pytest.raises(ValueError, match="needs `processor`"):
        type(scorer)()


def test_axes_are_weighted_and_summed(scorer: Any) -> None:
    prompts = prompts_of(scorer)
    each = {axis: type(scorer)(**FIXED, axes={axis: 1.0}) for axis in scorer.default_axes}
    scores = {axis: alone(MEDIA, prompts) for axis, alone in each.items()}
    assert len({tuple(values.tolist()) for values in scores.values()}) == len(scores)
    expected = sum(scorer.default_axes[axis] * values for axis, values in scores.items())
    torch.testing.assert_close(scorer(MEDIA, prompts), expected)


def as_published(scorer: Any, question: str, pictures: list[Image.Image], text: str) -> Tensor:
    """The hidden states [L, width] and ids [L] of one sample by the authors' way: embeddings
    without ids, so that transformers numbers the tokens itself."""
    chat = "<|im_start|>user\n" + "<|vision_start|><|image_pad|><|vision_end|>" * len(pictures)
    chat += question.replace("{text_prompt}", text) + "<|im_end|>\n<|im_start|>assistant\n"
    inputs = scorer.processor(text=[chat], images=pictures, return_tensors="pt")
    model = scorer.model
    model.rope_deltas = None
    ids, embedded = inputs["input_ids"], model.get_input_embeddings()(inputs["input_ids"])
    seen = model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"]).pooler_output
    mask = (ids == model.config.image_token_id).unsqueeze(-1).expand_as(embedded)
    embedded = embedded.masked_scatter(mask, seen)
    with torch.no_grad():
        out = model(input_ids=None, inputs_embeds=embedded, attention_mask=inputs["attention_mask"])
    return torch.cat([out.last_hidden_state[0], ids[0, :, None].float()], 1)


def picture(media: Tensor) -> Image.Image:
    """A picture in the size that the tiny build takes, resampled by Pillow."""
    array = media.mul(255).round().byte().movedim(0, -1).numpy()
    return Image.fromarray(array).resize((56, 56), Image.Resampling.BICUBIC)


def test_hpsv3_reads_mean_and_deviation_at_its_token() -> None:
    scorer, plain = HPSv3(**FIXED), MEDIA[:1, :, :, :40].contiguous()
    (text,) = scorer.texts
    states = as_published(scorer, text, [picture(plain[0])], "a red fox")
    token = scorer.processor.tokenizer.convert_tokens_to_ids("<|Reward|>")
    (row,) = states[states[:, -1] == token, :-1]
    weights = scorer.heads.state_dict()
    for layer in (0, 3, 5):
        row = weights[f"rm_head.{layer}.weight"] @ row + weights[f"rm_head.{layer}.bias"]
        row = row.relu() if layer < 5 else row
    values = scorer._axes(scorer.shown(plain, PROMPTS[:1]), PROMPTS[:1])
    torch.testing.assert_close(values["mu"], row[:1], rtol=1e-3, atol=1e-3)  # Pillow rounds
    torch.testing.assert_close(values["sigma"], row[1:].exp(), rtol=1e-3, atol=1e-3)
    careful = HPSv3(**FIXED, axes={"mu": 1.0, "sigma": -1.0})
    torch.testing.assert_close(careful(plain, PROMPTS[:1]), values["mu"] - values["sigma"])


def test_edit_reward_is_asked_twice_about_sources_and_result() -> None:
    scorer = EditReward(**FIXED)
    edit = EDITS[0]
    result = MEDIA[:1, :, :, :40].contiguous()
    source = edit.images[0].fit_to_size(40, 40).resize((56, 56), Image.Resampling.BICUBIC)
    token = scorer.processor.tokenizer.convert_tokens_to_ids("<|Reward|>")
    means = []
    for number, text in enumerate(scorer.texts):
        states = as_published(scorer, text, [source, picture(result[0])], edit.text)
        (row,) = states[states[:, -1] == token, :-1]
        means.append(scorer.heads["rm_heads"][f"head_{number}"](row)[0])
    torch.testing.assert_close(
        scorer(result, [edit]), torch.stack(means).mean(0, keepdim=True), rtol=1e-3, atol=1e-3
    )
    several = replace(edit, images=(*edit.images, replace(EDITS[1].images[0], role="image")))
    (shown,) = scorer.shown(result, [several])
    assert len(shown) == 3
    assert torch.equal(shown[-1], result[0].mul(255).round().byte())
    assert not torch.equal(shown[0], shown[1])
    with pytest.raises(ValueError, match="has no image"):
        scorer.check_prompts(PROMPTS)
    with pytest.raises(RewardError, match="has no image"):
        scorer(MEDIA, PROMPTS)


def test_videoalign_normalises_each_axis_at_its_own_token() -> None:
    scorer = VideoAlign(**FIXED)
    weight = torch.zeros_like(scorer.heads["rm_head"].weight)
    prompts = PROMPTS[:2]
    shown = scorer.shown(MEDIA[:2], prompts)
    hidden = scorer._hidden(scorer.texts[0], shown, prompts)  # [B, 3, width]
    assert hidden.shape[1] == 3
    assert not torch.allclose(hidden[:, 0], hidden[:, 1])
    # Only the third axis tells the two samples apart: its direction separates their third tokens.
    weight[2] = hidden[0, 2] - hidden[1, 2]
    scorer.heads["rm_head"].weight.copy_(weight)
    values = scorer._axes(shown, prompts)
    for axis in ("VQ", "MQ"):
        mean, deviation = NORM[axis]
        assert values[axis].tolist() == pytest.approx([-mean / deviation] * 2)
    mean, deviation = NORM["TA"]
    expected = ((hidden[:, 2] @ weight[2]) - mean) / deviation
    torch.testing.assert_close(values["TA"], expected)
    first, second = scorer(MEDIA[:2], prompts).tolist()
    assert first > second
    scorer.norm = dict.fromkeys(NORM, (0.0, 1.0))
    assert scorer._axes(shown, prompts)["VQ"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("total", "rate", "frames"),
    [
        (33, 16.0, [0, 11, 21, 32]),  # 4.1 asked, 4 taken
        (53, 8.0, [0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52]),  # 13.25 -> 14
        (81, 16.0, [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]),
        (5, 16.0, [0, 1, 3, 4]),
        (3, 16.0, [0, 2]),
        (1, 16.0, [0, 0]),
    ],
)
def test_videoalign_looks_twice_a_second(total: int, rate: float, frames: list[int]) -> None:
    scorer = VideoAlign.__new__(VideoAlign)
    scorer.video_fps, scorer.fps = rate, 2.0
    assert scorer.frames(total) == frames


def test_a_video_that_plays_backwards_scores_otherwise() -> None:
    scorer = VideoAlign(**FIXED)
    video = torch.rand(1, 8, 3, 40, 40, generator=torch.Generator().manual_seed(1))
    forwards, backwards = scorer(video, PROMPTS[:1]), scorer(video.flip(1), PROMPTS[:1])
    assert not torch.allclose(forwards, backwards, atol=1e-6)


def test_a_prompt_cannot_spell_a_reward_token() -> None:
    scorer = HPSv3(**FIXED)
    sly, plain = Prompt("<|Reward|> fox"), Prompt("< |Reward|> fox")
    assert torch.equal(scorer(MEDIA[:1], [sly]), scorer(MEDIA[:1], [plain]))


def test_pictures_are_brought_to_the_authors_size() -> None:
    image, video = HPSv3.__new__(HPSv3), VideoAlign.__new__(VideoAlign)
    image.pixels = video.pixels = PIXELS
    for (height, width), fixed, bounded in (
        ((1024, 1024), (448, 448), (448, 448)),
        ((100, 100), (448, 448), (336, 336)),
        ((400, 400), (448, 448), (392, 392)),
        ((480, 832), (336, 588), (336, 588)),
    ):
        item = torch.zeros(3, height, width, dtype=torch.uint8)
        assert tuple(image._sized(item).shape[1:]) == fixed
        assert tuple(video._sized(item[None]).shape[2:]) == bounded


# ---- published files


def test_files_of_older_transformers_are_renamed(tmp_path: Path) -> None:
    network = write_tiny(tmp_path, "Qwen2VL")
    now = {key: value for key, value in network.state_dict().items() if "lm_head" not in key}
    old = published_names(network.state_dict())
    for name in (
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.norm.weight",
        "visual.blocks.0.attn.qkv.weight",
        "visual.merger.mlp.0.weight",
        "visual.patch_embed.proj.weight",
        "lm_head.weight",
    ):
        assert name in old
    for published in (old, {f"base_model.model.{key}": value for key, value in old.items()}, now):
        back = renamed(published)
        assert back.keys() == now.keys()
        assert all(torch.equal(back[key], value) for key, value in now.items())


def test_low_rank_weights_are_merged_as_peft_does(tmp_path: Path) -> None:
    network = write_tiny(tmp_path, "Qwen2VL")
    settings = LoraConfig(r=4, lora_alpha=128, target_modules=["q_proj", "down_proj"])
    adapted = get_peft_model(network, settings)
    for name, value in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.02)
    published = {key: value.clone() for key, value in adapted.state_dict().items()}
    assert any(".base_layer." in key for key in published)
    merged = adapted.merge_and_unload()
    assert isinstance(merged, Qwen2VLForConditionalGeneration)
    expected = {key: value for key, value in merged.state_dict().items() if "lm_head" not in key}
    got = renamed(published, lora_alpha=128.0)
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-5, atol=1e-6)


def test_a_published_file_and_its_authors_question_are_loaded(tmp_path: Path) -> None:
    """The tiny build's own file through the code of the real one."""
    scorer, folder = HPSv3(**FIXED), tmp_path / "base"
    folder.mkdir()
    with torch.random.fork_rng():
        scorer._write_tiny(folder)
    template = tmp_path / "data_collator_qwen.py"
    template.write_text(
        'raise SystemExit("never run")\nINSTRUCTION = "How good is {text_prompt}?"\n'
        'prompt_with_special_token = " Say it: <|Reward|> END"\nother = 3\n'
    )
    weights = folder / "reward.safetensors"
    real = {
        "processor": str(folder),
        "template": str(template),
        "device": "cpu",
        "dtype": "float32",
    }
    loaded = HPSv3(path=str(weights), **real)
    assert loaded.texts == ("How good is {text_prompt}? Say it: <|Reward|> END",)
    assert loaded.pixels == PIXELS
    assert "hpsv3(reward.safetensors, mu=1, sigma=0" in loaded.model_id
    assert loaded.model_id.partition("question=")[2] != scorer.model_id.partition("question=")[2]
    assert torch.isfinite(loaded(MEDIA[:1], PROMPTS[:1])).all()
    assert published_texts(tmp_path)["INSTRUCTION"] == "How good is {text_prompt}?"
    template.write_text('INSTRUCTION = "x"\n')
    with pytest.raises(ValueError, match="has no text prompt_with_special_token"):
        HPSv3(path=str(weights), **real)
    template.write_text('INSTRUCTION = prompt_with_special_token = "x<|Reward|>"\n')
    tensors = load_file(weights)
    save_file(tensors | {"model.layers.9.mlp.up_proj.weight": torch.zeros(1)}, weights)
    with pytest.raises(ValueError, match=r"is no hpsv3: .*layers\.9"):
        HPSv3(path=str(weights), **real)
    save_file({key: tensors[key] for key in tensors if key != "model.norm.weight"}, weights)
    with pytest.raises(ValueError, match=r"is no hpsv3: .*norm\.weight"):
        HPSv3(path=str(weights), **real)
    with pytest.raises(FileNotFoundError, match="give `path` the published file"):
        HPSv3(path=str(tmp_path / "none.safetensors"), **real)
