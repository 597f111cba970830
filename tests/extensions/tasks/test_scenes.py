"""The scenes family: packing, features that know order, the committed base model, bit-equal replay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from digenrl.data import load_prompts
from digenrl.diffusion import denoise
from digenrl.diffusion.sde import FlowSDE
from digenrl.diffusion.steps import AllButLast
from digenrl.extensions.tasks.scenes import (
    BASE_FILE,
    EDIT_BASE_FILE,
    ScenesEditPolicy,
    ScenesPolicy,
    pack_pictures,
    text_features,
)
from digenrl.rewards.protocol import source_images
from digenrl.types import CellBlock, Prompt
from reward_models.drawn_scenes import PAPER, SCENES, draw, draw_places, draw_scenes
from reward_models.scene_edits import SAME
from reward_models.scene_judges import JUDGE_FILE, OFF_PAPER, SceneDetector, SceneStatistics, spread
from scripts.drawn_edits import EDITS
from scripts.pretrain_scenes import sample_edits, sample_scenes
from tests.sampling import sample

LORA = yaml.safe_load((Path(__file__).parents[3] / "configs/model/scenes.yaml").read_text())["lora"]


def test_packing_is_undone_by_decoding() -> None:
    _, pictures = draw_scenes(4, torch.Generator().manual_seed(0))
    latents = pack_pictures(pictures)
    assert latents.shape == (4, 36, 48)
    assert torch.allclose(ScenesPolicy("random").codec.decode(latents), pictures, atol=1e-6)
    policy = ScenesPolicy("random")
    assert (
        policy.codec.decode(-100 * latents).max(),
        policy.codec.decode(100 * latents).min(),
    ) == (1, 0)


def test_text_features_know_the_order_of_words_and_no_filling_words() -> None:
    texts = [
        "a red circle above a blue square",
        "a blue square above a red circle",
        "A red circle above a blue squares",
    ]
    features = text_features([*texts, "a red circle left of a blue square"])
    assert not torch.equal(features["pooled"][0], features["pooled"][1])
    assert not torch.equal(features["text"][0], features["text"][1])
    assert torch.equal(features["text"][0], features["text"][2])
    assert torch.equal(features["text"][0, 4:], features["text"][3, 4:])  # "of" moves nothing


@pytest.mark.heavy
def test_the_committed_base_model_is_sharp_and_diverse_and_follows_half_of_the_prompts() -> None:
    scenes = [scene for scene in SCENES[::23] for _ in range(8)]
    pictures = sample_scenes(ScenesPolicy(), scenes, steps=6)
    assert 0.35 <= SceneDetector(perfect=True).judge(pictures, scenes).mean() <= 0.6
    real = draw(
        [scene.kinds for scene in scenes], draw_places(scenes, torch.Generator().manual_seed(0))
    )
    assert spread(pictures, scenes)[1] > 0.8 * spread(real, scenes)[1]
    assert (
        SceneStatistics()(pictures, [Prompt(scene.text) for scene in scenes])["diversity_ratio"]
        > 0.85
    )
    assert BASE_FILE.stat().st_size + JUDGE_FILE.stat().st_size < 4 * 2**20


@pytest.mark.heavy
def test_the_committed_edit_base_keeps_the_rest_and_leaves_the_edit_to_learn() -> None:
    edits = list(EDITS[::23])
    sources, pictures = sample_edits(ScenesEditPolicy(), edits, steps=6)
    right = SceneDetector(perfect=True).judge(pictures, [edit.after for edit in edits])
    assert 0.35 <= right.mean() <= 0.6
    paper = (sources - PAPER[:, None, None]).norm(dim=1) < OFF_PAPER
    assert ((pictures - sources).norm(dim=1) < SAME)[paper].float().mean() > 0.98
    assert EDIT_BASE_FILE.stat().st_size < 4 * 2**20


def test_the_picture_is_part_of_what_is_encoded() -> None:
    policy, prompts = ScenesEditPolicy(), load_prompts("drawn_edits.jsonl")
    twice = next(p for p in prompts if p.text == prompts[0].text and p.images != prompts[0].images)
    condition = policy.codec.encode([prompts[0], twice])
    assert torch.equal(condition["text"][0], condition["text"][1])
    assert not torch.equal(condition["image"][0], condition["image"][1])
    source = source_images(torch.zeros(1, 3, 24, 24), [twice])
    assert torch.allclose(policy.codec.decode(condition["image"][1:]), source, atol=1e-6)
    with pytest.raises(
        ValueError, match="scenes_edit takes 1 images of role image, the prompt has 0"
    ):
        policy.codec.encode([Prompt("make the circle green")])


@pytest.mark.parametrize("family", [ScenesPolicy, ScenesEditPolicy])
def test_replay_is_bit_equal_to_sampling(family: type[ScenesPolicy]) -> None:
    policy, kernel = family(lora=LORA), FlowSDE(1.0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.adapter.trained_parameters().values():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    prompt, grid = load_prompts("drawn_edits.jsonl")[0], policy.sigma_grid(6)
    condition, plan = policy.codec.encode([prompt]), AllButLast().plan_steps(0, 0, 6)
    samples = sample(
        policy, condition, denoise.SampleKey(0, 0, prompt.uid, tuple(range(16))), grid, kernel, plan
    )
    for place, step in enumerate(plan.trained):
        part = slice(place, place + 1)
        block = CellBlock(
            step=0, group=0, uid=prompt.uid, first_sample=0, version=0, steps=samples.steps[part], sigmas=grid,
            latents=samples.latents[:, part], next_latents=samples.next_latents[:, part],
            log_probs=samples.log_probs[:, part], condition=condition,
        )  # fmt: skip
        assert torch.equal(
            denoise.replay(policy, block, kernel).log_prob.detach(), block.log_probs
        ), step


def test_bad_arguments_name_value_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"height=64.*sampling\.height=24"):
        ScenesPolicy(height=64)
    with pytest.raises(ValueError, match=r"guidance_scale=4\.5.*sampling\.guidance_scale=1"):
        ScenesPolicy(guidance_scale=4.5)
    with pytest.raises(FileNotFoundError, match="make pretrain-scenes"):
        ScenesPolicy(path=tmp_path / "absent.safetensors")
