"""Wan2.2 A14B: what its two transformers need beside what every family is asked for."""

from __future__ import annotations

import diffusers
import pytest
import torch

from digenrl.diffusion import denoise
from digenrl.extensions.export import diffusers_export
from digenrl.models.pretrained import PretrainedError
from digenrl.models.tiny import ensure
from tests.models.test_fail_closed import real
from tests.models.test_parity import PROMPTS, STEPS, noise_of, prompt
from tests.models.tiny_policies import diffusers_latents, make, randomise_lora

pytestmark = pytest.mark.heavy


def test_each_expert_has_a_scale_of_its_own():
    policy = make("wan22", guidance_scale=4.0, guidance_scale_2=2.0)
    noise = noise_of(policy, 1)
    ours = denoise.ode_sample(
        policy, policy.codec.encode([prompt(PROMPTS[0])]), noise, policy.sigma_grid(STEPS)
    )
    theirs = diffusers_latents("wan22", PROMPTS[:1], noise, STEPS, 4.0, guidance_scale_2=2.0)
    alike = diffusers_latents("wan22", PROMPTS[:1], noise, STEPS, 4.0)
    assert (ours - theirs).abs().max() <= 1e-5
    assert (ours - alike).abs().max() > 1e-3


def test_one_forward_of_rows_of_both_experts_equals_each_experts_own():
    policy = make("wan22", guidance_scale=1.0)
    first, second = policy.transformer.transformer, policy.transformer.transformer_2
    noise, sigmas = noise_of(policy, 3), torch.tensor([0.5, 0.9, 0.8])
    condition = denoise.expand_condition(policy.codec.encode([prompt(PROMPTS[0])]), 3)
    with torch.no_grad():
        both = policy.velocity(noise, sigmas, condition)
        for row, expert in enumerate((second, first, second)):
            alone = expert(
                noise[row : row + 1],
                sigmas[row : row + 1] * 1000,
                condition["text"][:1],
                return_dict=False,
            )
            assert (both[row : row + 1] - alone[0]).abs().max() <= 1e-6
    assert not torch.equal(first.proj_out.weight, second.proj_out.weight)


def test_a_checkpoint_with_another_number_of_transformers_is_refused():
    with pytest.raises(
        PretrainedError,
        match=r"holds two transformers, which the wan adapter .* use model=wan22_a14b",
    ):
        real("wan", ensure("wan22"))
    with pytest.raises(
        PretrainedError, match="holds one transformer, which the wan22 adapter does not read"
    ):
        real("wan22", ensure("wan"))


def test_a_scale_below_one_is_refused():
    with pytest.raises(ValueError, match=r"model\.guidance_scale_2=0\.5: use 1"):
        make("wan22", guidance_scale_2=0.5)


def test_each_expert_has_its_own_adapter_under_the_names_of_other_tools(tmp_path):
    policy = make("wan22")
    randomise_lora(policy)
    diffusers_export.export_policy(policy, tmp_path)
    files = diffusers_export.export_layout(policy, tmp_path, "comfyui")
    assert [file.name for file in files] == [
        "lora_comfyui.safetensors",
        "lora_comfyui_2.safetensors",
    ]
    adapters = []
    for part, file in zip(policy.components, files, strict=True):
        names = (diffusers_export.lora_file(part), file.name)
        ours, read = (
            diffusers.WanPipeline.lora_state_dict(tmp_path, weight_name=name) for name in names
        )
        assert read.keys() == ours.keys()
        adapters.append(ours)
    assert not any(torch.equal(adapters[0][name], value) for name, value in adapters[1].items())
