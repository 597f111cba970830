"""The digits family: packing, hash features, the committed base model, and bit-equal replay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from digenrl import keys
from digenrl.diffusion import denoise
from digenrl.diffusion.sde import FlowSDE
from digenrl.diffusion.steps import AllButLast
from digenrl.extensions.tasks.digits import BASE_FILE, DigitsPolicy, pack_latents, text_features
from digenrl.models.latents import unpack_latents
from digenrl.types import CellBlock, Prompt
from reward_models.digit_judge import WORDS, DigitJudge, DigitStatistics
from tests.sampling import sample

LORA = yaml.safe_load((Path(__file__).parents[3] / "configs/model/digits.yaml").read_text())["lora"]
PROMPTS = [Prompt(f"number {word}") for word in WORDS]
STEPS = 6


def perturbed(policy: DigitsPolicy) -> DigitsPolicy:
    """The policy with LoRA B matrices that are not zero, so that the adapter matters."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.adapter.trained_parameters().values():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return policy


def base_samples(per_prompt: int) -> tuple[Tensor, list[Prompt]]:
    policy = DigitsPolicy()
    media, rows = [], []
    for prompt in PROMPTS:
        noise = keys.noise(7, 0, prompt.uid, range(per_prompt), keys.INITIAL, policy.latent_shape)
        media.append(
            policy.codec.decode(
                denoise.ode_sample(
                    policy, policy.codec.encode([prompt]), noise, policy.sigma_grid(STEPS)
                )
            )
        )
        rows += [prompt] * per_prompt
    return torch.cat(media), rows


def test_a_token_is_a_two_by_two_patch() -> None:
    images = torch.arange(64.0).view(1, 1, 8, 8)
    latents = pack_latents(images)
    assert latents.shape == (1, 16, 4)
    assert latents[0, 0].tolist() == [0.0, 1.0, 8.0, 9.0]
    assert latents[0, 5].tolist() == [18.0, 19.0, 26.0, 27.0]
    assert torch.equal(unpack_latents(latents, 8, 8), images)


def test_text_features_are_frozen_and_tell_words_apart() -> None:
    features = text_features(["number seven", "Number, SEVEN!", "number three"])
    assert torch.equal(features["text"][0], features["text"][1])
    assert not torch.equal(features["pooled"][0], features["pooled"][2])
    # The committed weights depend on these very values.
    assert features["text"][0, 0, :3].tolist() == pytest.approx(
        [1.2883872, -0.2475604, 0.8384071], abs=1e-6
    )
    assert text_features(["a b c d e"])["text"].shape == (1, 4, 32)
    assert not torch.equal(
        text_features(["a b c d e"])["pooled"], text_features(["a b c d f"])["pooled"]
    )


@pytest.mark.heavy
def test_the_committed_base_model_is_good_but_follows_prompts_badly() -> None:
    media, rows = base_samples(50)
    statistics = DigitStatistics()(media, rows)
    assert 0.45 <= DigitJudge("b", "accuracy")(media, rows).mean() <= 0.65
    assert 0.9 <= statistics["diversity_ratio"] <= 1.1
    assert statistics["nn_distance"] < 1.7
    assert BASE_FILE.stat().st_size < 2 * 2**20


@pytest.mark.parametrize("rows", [5, 16])
@pytest.mark.parametrize("steps_per_forward", [1, 2, 5])
def test_replay_equals_sampling_for_any_steps_per_forward(
    rows: int, steps_per_forward: int
) -> None:
    """To the bit where a forward has as many rows as in sampling. More rows may meet another kernel
    of the processor's matrix library, which adds in another order."""
    policy, kernel, selection = perturbed(DigitsPolicy(lora=LORA)), FlowSDE(0.9), AllButLast()
    condition, grid = policy.codec.encode(PROMPTS[:1]), policy.sigma_grid(STEPS)
    plan = selection.plan_steps(0, 0, STEPS)
    key = denoise.SampleKey(0, 0, PROMPTS[0].uid, tuple(range(rows)))
    samples = sample(policy, condition, key, grid, kernel, plan)
    for first in range(0, len(plan.trained), steps_per_forward):
        part = slice(first, first + steps_per_forward)
        block = CellBlock(
            step=0,
            group=0,
            uid=key.uid,
            first_sample=0,
            version=0,
            steps=samples.steps[part],
            sigmas=grid,
            latents=samples.latents[:, part],
            next_latents=samples.next_latents[:, part],
            log_probs=samples.log_probs[:, part],
            condition=condition,
        )
        replayed = denoise.replay(policy, block, kernel).log_prob.detach()
        assert torch.allclose(replayed, block.log_probs, rtol=0, atol=2e-6)
        assert steps_per_forward > 1 or torch.equal(replayed, block.log_probs)


def test_lora_reaches_every_stream_and_the_reference_is_the_base() -> None:
    base, policy = DigitsPolicy(), perturbed(DigitsPolicy(lora=LORA))
    latents, sigmas = torch.randn(4, 16, 4), torch.rand(4)
    condition = policy.codec.encode(PROMPTS[:4])
    adapted = policy.velocity(latents, sigmas, condition)
    adapted.square().mean().backward()
    assert policy.adapter.parameters_without_gradient() == []
    assert (
        sum(parameter.numel() for parameter in policy.adapter.trained_parameters().values())
        == 62_528
    )
    with torch.no_grad(), policy.adapter.reference():
        reference = policy.velocity(latents, sigmas, condition)
    with torch.no_grad():
        expected = base.velocity(latents, sigmas, condition)
    assert torch.equal(reference, expected)
    assert not torch.allclose(adapted, reference)


def test_decode_clamps_to_the_unit_interval() -> None:
    media = DigitsPolicy().codec.decode(torch.full((2, 16, 4), 3.0))
    assert media.shape == (2, 1, 8, 8)
    assert torch.equal(media, torch.ones(2, 1, 8, 8))


def test_bad_arguments_name_value_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"height=64.*sampling\.height=8"):
        DigitsPolicy(height=64)
    with pytest.raises(ValueError, match=r"guidance_scale=4\.5.*sampling\.guidance_scale=1"):
        DigitsPolicy(guidance_scale=4.5)
    with pytest.raises(FileNotFoundError, match="make pretrain"):
        DigitsPolicy(path=tmp_path / "absent.safetensors")
    weights = load_file(BASE_FILE)
    weights.pop("proj_out.bias")
    save_file(weights, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"another network: 1 tensors differ \(proj_out\.bias"):
        DigitsPolicy(path=tmp_path / "other.safetensors")
