"""The adapter is the diffusers pipeline: same noise, same steps, same latents; and replay is
sampling."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from digenrl.diffusion import denoise
from digenrl.diffusion.sde import FlowSDE
from digenrl.diffusion.steps import StepPlan
from digenrl.models.pipeline_codec import DiffusersCodec
from digenrl.types import CellBlock
from tests.models.families import drawn_in_one_step
from tests.models.tiny_policies import (
    FACTS,
    FAMILIES,
    IMAGES,
    LORA,
    MASKED,
    ROWS,
    VIDEO,
    diffusers_latents,
    make,
    prompt,
    randomise_lora,
    size,
)
from tests.sampling import sample

PROMPTS = ['a red circle with "one" on a blue background', "a sign"]
STEPS = 4
SOME = [
    family if row.unusual else pytest.param(family, marks=pytest.mark.slow)
    for family, row in ROWS.items()
]
"""Families of unlike networks, for what is the same code in all of them; the others are slow."""
FIRST = [
    family if family in ("sd3", "wan") else pytest.param(family, marks=pytest.mark.heavy)
    for family in FAMILIES
]
"""A family of pictures and one of videos, so that `make test-fast` has both; the others are heavy."""


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def noise_of(policy, rows: int) -> torch.Tensor:
    return torch.randn(rows, *policy.latent_shape, generator=torch.Generator().manual_seed(3))


CASES = [
    pytest.param(family, *scales, marks=() if scales == row.guidance[-1] else pytest.mark.slow)
    for family, row in ROWS.items()
    for scales in row.guidance
]
"""Each family with the most guidance that it knows; with less, slow."""


@pytest.mark.heavy
@pytest.mark.parametrize(("family", "guidance", "true_cfg"), CASES)
def test_ode_sampling_equals_the_diffusers_pipeline(family, guidance, true_cfg):
    policy = make(family, guidance_scale=guidance, true_cfg_scale=true_cfg)
    noise = noise_of(policy, len(PROMPTS))
    condition = policy.codec.encode([prompt(text) for text in PROMPTS])
    alone = policy.codec.encode([prompt(PROMPTS[1])])["text"].shape[1]
    for sizes in FACTS[family].models.values():
        whole = policy.codec.max_sequence_length + sizes.get("padded", 0)
        assert alone == whole if "padded" in sizes else alone < whole, "what a plan counts as text"
    ours = denoise.ode_sample(policy, condition, noise, policy.sigma_grid(STEPS))
    theirs = diffusers_latents(family, PROMPTS, noise, STEPS, guidance, true_cfg)
    assert ours.shape == theirs.shape
    assert (ours - noise).abs().max() > 0.1
    assert (ours - theirs).abs().max() <= 1e-5


def block_of(policy, steps, storage_dtype, kernel, plan):
    condition = policy.codec.encode([prompt(PROMPTS[0])])
    key = denoise.SampleKey(seed=0, step=0, uid=7, samples=(0, 1, 2))
    sigmas = policy.sigma_grid(steps)
    samples = sample(policy, condition, key, sigmas, kernel, plan, storage_dtype)
    return CellBlock(
        step=0,
        group=0,
        uid=7,
        first_sample=0,
        version=0,
        steps=samples.steps,
        sigmas=sigmas,
        latents=samples.latents,
        next_latents=samples.next_latents,
        log_probs=samples.log_probs,
        condition=condition,
    )


def cell(block: CellBlock, k: int) -> CellBlock:
    return CellBlock(
        **{
            **vars(block),
            "steps": block.steps[k : k + 1],
            "latents": block.latents[:, k : k + 1],
            "next_latents": block.next_latents[:, k : k + 1],
            "log_probs": block.log_probs[:, k : k + 1],
        }
    )


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("family", "storage_dtype"),
    [(family, torch.bfloat16) for family in FAMILIES] + [("sd3", torch.float32)],
)
def test_replay_is_exact_at_the_same_geometry_and_close_when_steps_share_a_forward(
    family, storage_dtype
):
    policy = make(family, guidance_scale=4.0, gradient_checkpointing=True)
    randomise_lora(policy)
    kernel, plan = FlowSDE(0.7), StepPlan(sde=(0, 1, 2, 3), trained=(0, 1, 2))
    block = block_of(policy, 5, storage_dtype, kernel, plan)
    assert block.latents.dtype == storage_dtype
    for k in range(3):
        one = denoise.replay(policy, cell(block, k), kernel)
        assert torch.equal(one.log_prob[:, 0].detach(), block.log_probs[:, k])
    together = denoise.replay(policy, block, kernel)
    assert (together.log_prob - block.log_probs).abs().max() <= 1e-6
    together.log_prob.sum().backward()
    assert policy.adapter.parameters_without_gradient() == []
    grads = [
        parameter.grad.abs().max() for parameter in policy.adapter.trained_parameters().values()
    ]
    assert min(grads) > 0


@pytest.mark.parametrize("family", FIRST)
def test_full_fine_tuning_trains_every_weight_that_the_output_reads(family):
    policy = make(family, lora="full", guidance_scale=4.0)
    condition = policy.codec.encode([prompt(PROMPTS[0])])
    levels = torch.tensor([0.95, 0.5])
    policy.velocity(
        noise_of(policy, 2), levels, denoise.expand_condition(condition, 2)
    ).square().sum().backward()
    assert policy.adapter.parameters_without_gradient() == []
    assert all(parameter.grad.any() for parameter in policy.adapter.trained_parameters().values())
    frozen = [
        name
        for name, parameter in policy.transformer.named_parameters()
        if not parameter.requires_grad
    ]
    assert all(name.startswith(("transformer_blocks.1.", *policy.unused)) for name in frozen)
    assert len(frozen) == ROWS[family].unread


@pytest.mark.heavy
@pytest.mark.parametrize("family", ["sd3", *MASKED[:1]])
def test_replay_in_bfloat16_is_exact_at_the_same_geometry(family):
    policy = make(family, guidance_scale=4.0, dtype="bfloat16")
    randomise_lora(policy)
    kernel, plan = FlowSDE(0.7), StepPlan(sde=(0, 1, 2), trained=(0, 1))
    block = block_of(policy, 4, torch.float16, kernel, plan)
    for k in range(2):
        with torch.no_grad():
            assert torch.equal(
                denoise.replay(policy, cell(block, k), kernel).log_prob[:, 0], block.log_probs[:, k]
            )


def test_sigma_grids_follow_the_measured_ones():
    # Reference values of the published schedulers (ten steps unless said).
    expected = {
        ("wan", "explicit"): [1, 0.964, 0.923, 0.875, 0.818, 0.75, 0.667, 0.563, 0.429, 0.25, 0],
        ("sd3", "explicit"): [1, 0.964, 0.923, 0.875, 0.818, 0.75, 0.667, 0.563, 0.429, 0.25, 0],
        ("sd3", "scheduler"): [1, 0.96, 0.913, 0.858, 0.79, 0.707, 0.602, 0.465, 0.278, 0.009, 0],
    }
    for (family, grid), sigmas in expected.items():
        assert torch.allclose(
            make(family, grid=grid).sigma_grid(10), torch.tensor(sigmas).float(), atol=1e-3
        )
    flux = make("flux", height=512, width=512).sigma_grid(10)
    measured = [1, 0.944, 0.882, 0.814, 0.738, 0.652, 0.556, 0.446, 0.319, 0.173, 0]
    assert torch.allclose(flux, torch.tensor(measured).float(), atol=1e-3)
    constant = make("flux", shift=3.0).sigma_grid(10)
    assert torch.allclose(constant, torch.tensor(expected["wan", "explicit"]).float(), atol=1e-3)


@pytest.mark.heavy
def test_sigma_grids_of_all_families_end_as_measured():
    for family, (steps, last) in {
        family: row.sigmas for family, row in ROWS.items() if row.sigmas[0]
    }.items():
        found = make(family).sigma_grid(steps)[-len(last) :]
        assert torch.allclose(found, torch.tensor(last).float(), atol=1e-3), family
    for family in (
        name for name, facts in FACTS.items() if facts.tiny["scheduler"].get("shift_terminal")
    ):
        with pytest.raises(ValueError, match="at least 2 steps"):
            make(family).sigma_grid(1)


@pytest.mark.heavy
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_different_sigmas_and_prompts_equal_one_row_at_a_time(family):
    policy = make(family, guidance_scale=1.0)
    randomise_lora(policy)
    prompts = [prompt(text) for text in (*PROMPTS, "a cat in the rain at night")]
    condition = policy.codec.encode(prompts)
    noise, sigmas = noise_of(policy, 3), torch.tensor([0.9, 0.5, 0.1])
    with torch.no_grad():
        batch = policy.velocity(noise, sigmas, condition)
        for row in range(3):
            alone = policy.velocity(
                noise[row : row + 1],
                sigmas[row : row + 1],
                {k: v[row : row + 1] for k, v in condition.items()},
            )
            assert (batch[row : row + 1] - alone).abs().max() <= 1e-6 * max(
                1.0, alone.abs().max().item()
            )
    assert batch.dtype == torch.float32


@pytest.mark.heavy
@pytest.mark.parametrize("family", SOME)
def test_reference_is_the_base_model_and_leaves_the_adapter_as_it_was(family):
    policy = make(family)
    base = make(family)
    randomise_lora(policy)
    condition, noise, sigma = (
        policy.codec.encode([prompt("a star")]),
        noise_of(policy, 1),
        torch.tensor([0.7]),
    )
    with torch.no_grad():
        adapted = policy.velocity(noise, sigma, condition)
        with policy.adapter.reference():
            reference = policy.velocity(noise, sigma, condition)
        assert torch.equal(reference, base.velocity(noise, sigma, condition))
        assert not torch.equal(reference, adapted)
        assert torch.equal(policy.velocity(noise, sigma, condition), adapted)
    assert list(policy.adapter.trained_parameters()) == list(base.adapter.trained_parameters())


@pytest.mark.heavy
@pytest.mark.parametrize("family", FAMILIES)
def test_decode_gives_media_in_the_unit_range(family):
    policy = make(family)
    media = policy.codec.decode(noise_of(policy, 2))
    wanted = size(family)
    frames = (wanted["frames"],) if family in VIDEO else ()
    assert media.shape == (2, *frames, 3, wanted["height"], wanted["width"])
    assert media.dtype == torch.float32
    assert 0 <= media.min() < media.max() <= 1


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks={"sd3": pytest.mark.heavy, "wan": ()}.get(name, pytest.mark.slow))
        for name in FAMILIES
    ],
)
def test_decode_equals_the_diffusers_pipeline(family):

    from digenrl.models import tiny as tiny_builds

    policy, row = make(family), ROWS[family]
    latents = noise_of(policy, 1)
    pipeline = row.load(tiny_builds.ensure(family))
    pipeline.set_progress_bar_config(disable=True)
    more = row.latents(latents) | dict(row.decodes)
    more |= {"num_frames": policy.codec.frames} if family in VIDEO else {}
    more |= {"image": IMAGES[0].fit_to_size(32, 32)} if policy.codec.reads else {}
    for vae in (policy.codec._vae, pipeline.vae):
        if "latents_mean" in dict(vae.named_buffers()):
            vae.latents_mean.fill_(0.3)
            vae.latents_std.fill_(1.7)
    pipeline.scheduler.step = lambda output, t, sample, **_: (sample,)
    output = drawn_in_one_step(pipeline, policy.codec, **more)
    decoded = row.shown(torch.from_numpy(np.asarray(output[0])))
    ours = policy.codec.decode(latents).movedim(-3, -1)
    assert (decoded - ours).abs().max() <= 1e-5


@pytest.mark.parametrize("family", FIRST)
def test_pictures_become_the_latents_that_decode_reads(family):
    """The autoencoder's mode, as `decode_latents` hands it back to the autoencoder. A family that
    reads no pictures says so, and a video says that a picture is none."""
    policy = make(family, **({"frames": 1} if family == "wan" else {}))
    knows = type(policy.codec).encode_latents is not DiffusersCodec.encode_latents
    assert knows or family not in ("sd3", "flux", "wan")
    if not knows or policy.codec.frames > 1:
        with pytest.raises(ValueError, match=r"data.samples = files: .*data.samples=generated"):
            policy.codec.encode_media(IMAGES[:1])
        return
    latents, vae = policy.codec.encode_media(IMAGES[:1]), policy.codec._vae
    assert latents.shape == (1, *policy.latent_shape)
    pixels = policy.codec.image_pixels(IMAGES[0])
    with torch.no_grad():
        mode = vae.encode(
            pixels.unsqueeze(2) if "z_dim" in vae.config else pixels
        ).latent_dist.mode()
        wanted = vae.decode(mode, return_dict=False)[0].reshape(pixels.shape)
    found = policy.codec.decode(latents).reshape(pixels.shape)
    assert found.std() > 0
    assert (found - (wanted / 2 + 0.5).clamp(0, 1)).abs().max() <= 1e-5


@pytest.mark.heavy
def test_the_repeated_blocks_are_compiled_and_nothing_else():
    plain, compiled = make("wan"), make("wan", compile=True)
    blocks = set(compiled.transformer.blocks)
    found = {module for module in compiled.transformer.modules() if module._compiled_call_impl}
    assert found == blocks
    assert len(blocks) > 1
    assert not any(module._compiled_call_impl for module in plain.transformer.modules())


@pytest.mark.heavy
@pytest.mark.slow
def test_compiled_blocks_sample_and_train_like_the_others():
    plain, compiled = make("wan"), make("wan", compile=True, gradient_checkpointing=True)
    condition, noise, sigma = (
        plain.codec.encode([prompt("a star")]),
        noise_of(plain, 1),
        torch.tensor([0.7]),
    )
    outputs = [policy.velocity(noise, sigma, condition) for policy in (plain, compiled)]
    assert torch.allclose(*outputs, atol=1e-5)
    for output in outputs:
        output.square().sum().backward()
    for name, parameter in plain.adapter.trained_parameters().items():
        assert torch.allclose(
            parameter.grad, compiled.adapter.trained_parameters()[name].grad, atol=1e-4
        ), name


@pytest.mark.heavy
@pytest.mark.slow
def test_compiled_blocks_take_any_number_of_rows_with_and_without_gradients_and_adapter():
    """More cases than PyTorch compiles of one function by default."""
    policy = make("wan", compile=True)
    condition, sigma = policy.codec.encode([prompt("a star")]), torch.tensor([0.7])
    with torch.compiler.set_stance("default", force_backend="eager"):
        for rows in (2, 4, 1, 3):
            noise = noise_of(policy, rows)
            given = {key: value.expand(rows, *value.shape[1:]) for key, value in condition.items()}
            policy.velocity(noise, sigma.expand(rows), given).sum().backward()
            with torch.no_grad():
                policy.velocity(noise, sigma.expand(rows), given)
                with policy.adapter.reference():
                    policy.velocity(noise, sigma.expand(rows), given)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 8


def test_attention_backend_is_set_for_the_whole_network_and_a_wrong_name_is_refused():
    policy, plain = make("wan", attention_backend="native"), make("wan")
    condition, noise, sigma = (
        plain.codec.encode([prompt("a star")]),
        noise_of(plain, 1),
        torch.tensor([0.7]),
    )
    with torch.no_grad():
        outputs = [each.velocity(noise, sigma, condition) for each in (plain, policy)]
    assert torch.allclose(*outputs, atol=1e-5)
    with pytest.raises(ValueError, match="warp_drive"):
        make("wan", attention_backend="warp_drive")


@pytest.mark.parametrize("family", FIRST)
def test_attention_is_pytorchs_choice_and_the_record_says_which(family):
    """If PyTorch prefers another kernel, the choice and the recorded name change."""
    policy, cpu = make(family), torch.device("cpu")
    assert make(family, attention_backend=None).attention_used(cpu) == policy.attention_used(cpu)
    assert policy.attention_used(cpu) == {"backend": "native", "kernel": "flash_attention"}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert policy.attention_used(cpu)["kernel"] == "math"
    named = make(family, attention_backend="_native_math")
    assert named.attention_used(cpu) == {"backend": "_native_math"}


def test_a_backend_without_a_backward_pass_is_refused():
    for name in ("sage", "_sage_qk_int8_pv_fp8_cuda", "_flash_3", "aiter_fa2_hub"):
        with pytest.raises(ValueError, match=f"attention_backend={name}: has no backward pass"):
            make("wan", attention_backend=name)


@pytest.mark.heavy
@pytest.mark.parametrize("family", SOME)
def test_a_rank_that_only_generates_holds_16_bit_adapters_and_computes_the_same(family):
    """What travels to it is what every forward of a trainer casts to; the scale is one that 16 bits
    round."""
    lora = LORA | {"alpha": 1.3 * LORA["rank"]}
    trained, halved = (
        make(family, lora=lora, dtype="bfloat16", guidance_scale=4.0) for _ in range(2)
    )
    for policy in (trained, halved):
        randomise_lora(policy)
    halved.adapter.only_generate()
    condition, noise, sigma = (
        trained.codec.encode([prompt("a star")]),
        noise_of(trained, 1),
        torch.tensor([0.7]),
    )
    with torch.no_grad():
        outputs = [policy.velocity(noise, sigma, condition) for policy in (trained, halved)]
    assert torch.equal(*outputs)
    assert {value.dtype for value in halved.adapter.trained_parameters().values()} == {
        torch.bfloat16
    }
    held = {
        name: (value.shape, value.dtype)
        for name, value in halved.adapter.trained_parameters().items()
    }
    assert {
        name: (v.shape, v.dtype) for name, v in trained.adapter.generating_parameters().items()
    } == held


@pytest.mark.heavy
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_that_only_generates_holds_half_and_computes_the_same(family):
    trained, halved = (
        make(family, lora="full", dtype="bfloat16", guidance_scale=4.0) for _ in range(2)
    )
    halved.adapter.only_generate()
    condition, noise, sigma = (
        trained.codec.encode([prompt("a star")]),
        noise_of(trained, 1),
        torch.tensor([0.7]),
    )
    with torch.no_grad():
        outputs = [policy.velocity(noise, sigma, condition) for policy in (trained, halved)]
    assert torch.equal(*outputs)
    size, half = (
        sum(p.numel() * p.element_size() for p in x.transformer.parameters())
        for x in (trained, halved)
    )
    assert half < 0.55 * size
