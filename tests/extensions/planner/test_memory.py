"""The memory model against real modules: bytes of weights exactly, activations as saved-tensor
hooks count them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.count_facts import attend, without_attention
from benchmarks.live_bytes import count_bytes
from digenrl.config import load
from digenrl.diffusion import denoise
from digenrl.diffusion.sde import FlowSDE
from digenrl.diffusion.sigmas import static_grid
from digenrl.diffusion.steps import StepPlan
from digenrl.extensions.planner.counts import (
    attention_flops,
    beside_bytes,
    forward_flops,
    kept_bytes,
    repeated_flops,
)
from digenrl.extensions.planner.memory import (
    GIB,
    RESERVED,
    TrainerLoad,
    decode_bytes,
    generating_bytes,
    moment_bytes,
    rollout_memory,
    stored_bytes,
    trainer_memory,
    vae_bytes,
)
from digenrl.extensions.planner.reading import workload_of
from digenrl.extensions.planner.workload import Workload, counted_models
from digenrl.models import checkpointing
from digenrl.models.lora import LoraSpec, inject_lora
from digenrl.recompute import Recompute, parse_recompute
from tests.algorithms.toy_policy import ToyPolicy, condition

INPUTS = Recompute(inputs=1.0)
KL: dict[str, Any] = {
    "latent_channels": 16,
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "use_post_quant_conv": False,
}
"""Sizes of FLUX.1's decoder."""
WAN = Workload("wan21_1_3b", 240, 416, 33, 20, 19, 32, 4, 2, True, 32, "attn")
FLUX = Workload("flux1_dev", 512, 512, 1, 6, 5, 48, 24, 2, False, 64)


def test_flops_hit_the_counted_points_and_the_reference_between_them() -> None:
    """Counted by torch: Wan2.1-14B at 480x832x81 1678 TFLOP, FLUX at 720 px 37.3, SD3.5 at 1024 px
    10.9."""
    cases = [
        (Workload("wan21_14b", 480, 832, 81, 20, 19, 1, 2, 1, True, 32), 1678.0),
        (Workload("wan21_14b", 240, 416, 33, 20, 19, 1, 2, 1, True, 32), 97.7),
        (Workload("flux1_dev", 720, 720, 1, 16, 9, 1, 2, 1, False, None), 37.3),
        (Workload("hunyuan_video", 480, 640, 53, 16, 9, 1, 2, 1, False, None), 446.0),
        (Workload("sd35_medium", 1024, 1024, 1, 10, 9, 1, 2, 1, True, 32), 10.9),
    ]
    for work, tflops in cases:
        assert forward_flops(work) / 1e12 == pytest.approx(tflops, rel=0.01)


def test_branches_that_run_one_after_the_other_need_the_room_of_one() -> None:
    both = Workload("sd35_medium", 512, 512, 1, 10, 9, 16, 16, 1, True, 32)
    room = {
        name: generating_bytes(work, 64, encoders=True)
        for name, work in {
            "both": both,
            "apart": replace(both, detached=True),
            "one": replace(both, guidance=False),
        }.items()
    }
    assert room["apart"] == room["one"] < 0.6 * room["both"]


@pytest.mark.parametrize(("trained", "spare"), [((0, 2, 4), 0), ((1, 2, 3), 2), ((0, 1, 2, 4), 0)])
def test_latents_of_scattered_steps_are_held_before_and_behind_each(
    trained: tuple[int, ...], spare: int
) -> None:
    """Two neighbours share one, so that a window of steps holds less than is planned."""
    policy, plan = ToyPolicy(), StepPlan(trained, trained)
    state = denoise.initial_state(denoise.SampleKey(0, 0, 1, (0, 1)), policy.latent_shape)
    for _ in range(6):
        state = denoise.advance_state(
            policy, condition(), state, static_grid(6), FlowSDE(0.7), plan
        )
    before = denoise.finished_samples(state, plan)
    held = {*state.kept_latents, *state.kept_next_latents, state.latents}
    both = before.latents.shape[1] + before.next_latents.shape[1]
    work = replace(FLUX, trained_steps=len(trained))
    one = 2 * work.latent_elements * work.storage_bytes
    assert stored_bytes(work, 2) // one == len(held) + both + spare


def test_the_peak_of_both_passes_is_that_of_the_loss_or_of_a_block_computed_again() -> None:
    """What blocks keep a part of is between the two that are counted; off-loading waits for one
    block more."""
    early, again = (beside_bytes(FLUX, mode, 2) for mode in ("all", "inputs"))
    found = [moment_bytes(FLUX, 2, parse_recompute(grade)) for grade in (*GRADES, "offload")]
    assert (found[0], found[3]) == (int(early), int(again))
    assert sorted(found) == found
    mean = kept_bytes(FLUX, "all", 2) * FLUX.sizes["blocks"] / FLUX.sizes["attention_blocks"]
    assert (
        mean < found[4] - again < 2.5 * mean
    )  # a double block has 2.4 times a single one's weights
    experts = Workload("wan22_a14b", 240, 416, 33, 20, 19, 32, 4, 2, True, 32)
    waits = [moment_bytes(experts, 2, parse_recompute(grade)) for grade in (True, "offload")]
    assert waits[1] - waits[0] == pytest.approx(kept_bytes(experts, "all", 2), rel=0.01)


@pytest.mark.heavy
def test_weights_gradients_and_optimizer_are_exact() -> None:
    from diffusers import WanTransformer3DModel
    from peft import LoraConfig

    with torch.device("meta"):
        model = WanTransformer3DModel(
            num_attention_heads=12, ffn_dim=8960, num_layers=30, attention_head_dim=128
        )
        base = sum(p.numel() for p in model.parameters())
        model.requires_grad_(False)
        targets = r".*blocks\.\d+\.attn[12]\.(to_[qkv]|to_out\.0)"
        model.add_adapter(LoraConfig(r=32, lora_alpha=64, target_modules=targets))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == WAN.trained_parameters
    memory = trainer_memory(WAN, TrainerLoad(1, 2, 1, False, False), INPUTS)
    assert (memory.frozen, memory.trained, memory.gradients, memory.optimizer) == (
        2 * base,
        4 * trained,
        4 * trained,
        8 * trained,
    )
    averaged = replace(WAN, ema=True)
    copies = [
        trainer_memory(work, TrainerLoad(1, 2, 1, False, lends), INPUTS).copies
        for work in (replace(WAN, ema=False, updates=2), replace(averaged, updates=2))
        for lends in (False, True)
    ]
    assert copies == [0, 4 * trained, 4 * trained, 8 * trained]
    # Values that were not sent, of this update and of the one before, in fp32.
    load = TrainerLoad(1, 2, 1, False, False, compresses=True)
    unsent = trainer_memory(WAN, load, INPUTS).copies
    assert unsent - memory.copies == 8 * trained
    sharded = trainer_memory(WAN, TrainerLoad(8, 2, 1, False, False), INPUTS)
    assert sharded.optimizer == 8 * -(-trained // 8)
    assert (
        sharded.gradients == 4 * trained
    )  # an adapter's wait unsharded for the update's last micro-batch
    full = Workload("wan21_1_3b", 240, 416, 33, 20, 19, 32, 4, 2, True, None)
    assert trainer_memory(full, TrainerLoad(8, 2, 1, False, False), INPUTS).gradients == 4 * -(
        -base // 8
    )
    alone = trainer_memory(full, TrainerLoad(1, 1, 1, False, False), INPUTS)
    assert alone.activations + alone.workspace >= 4 * base + RESERVED  # while the optimizer steps
    assert rollout_memory(full, 2, False).trained == 2 * base  # Adapter.only_generate
    assert rollout_memory(WAN, 2, False).frozen == 2 * base


@pytest.mark.parametrize("rank", [64, None])
def test_layers_outside_the_blocks_are_held_whole_by_sharded_trainers(rank: int | None) -> None:
    """An adapter's trainer has them twice as a backward pass begins; of all weights they bound what
    is held when their gradients are scattered."""
    tiny, published = replace(FLUX, lora_rank=rank, height=16, width=16, most_text=1), FLUX.sizes
    outside, block = (published[f"{part}_parameters"] for part in ("outside", "largest_block"))
    held = trainer_memory(tiny, TrainerLoad(8, 1, 1, False, False), INPUTS)
    assert held.gathered == (4 if rank else 8) * block + (4 * outside if rank else 0)
    alone = trainer_memory(tiny, TrainerLoad(10**6, 1, 1, False, False), INPUTS)
    assert alone.total - RESERVED >= (4 if rank else 8) * outside
    assert trainer_memory(tiny, TrainerLoad(1, 1, 1, False, False), INPUTS).gathered == 0


@pytest.mark.parametrize("rank", [64, None])
def test_every_rank_holds_the_tables_that_a_network_stores(rank: int | None) -> None:
    """SD3.5's positions of 384 x 384 patches, in the dtype in which its weights are read."""
    work = Workload("sd35_medium", 512, 512, 1, 10, 9, 16, 16, 1, True, rank)
    weights, table = 2 * work.sizes["parameters"] if rank else 0, 384**2 * 1536 * (2 if rank else 4)
    assert rollout_memory(work, 1, False).frozen == weights + table
    assert (
        trainer_memory(work, TrainerLoad(8, 1, 1, False, False), INPUTS).frozen
        == weights // 8 + table
    )


GRADES = (False, "products", "attention", True)


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("trained", ["full", "attn"])
def test_kept_bytes_are_those_of_a_real_build(trained: str, rows: int) -> None:
    """Two blocks of a Wan of a quarter of the 1.3B's width: what is counted on fake tensors is kept
    on real ones."""
    counted, _ = _counted(trained, rows, blocks=2, side=16, frames=2)
    for grade, (kept, expected) in counted.items():
        assert kept == pytest.approx(expected, rel=0.15), grade


@pytest.mark.heavy
@pytest.mark.parametrize("trained", ["full", pytest.param("attn", marks=pytest.mark.slow)])
def test_repeated_flops_are_those_of_a_real_build(trained: str) -> None:
    """What the backward pass of a block does again, attention aside, as a share of the block's
    forward."""
    spent: dict[bool | str, list[tuple[int, int]]] = {grade: [] for grade in GRADES}
    for blocks in (1, 2):
        # A product has as many FLOPs in fp32, which processors multiply ten times as fast.
        model, forward = _build(trained, 1, blocks, 4, side=32, frames=1, compute=torch.float32)
        for grade in GRADES:
            model.disable_gradient_checkpointing()
            checkpointing.enable_recompute(model, list(model.blocks), parse_recompute(grade))
            with FlopCounterMode(display=False) as counter:
                output = forward()
                alone = without_attention(counter)
                output.sum().backward()
            spent[grade].append((alone, without_attention(counter)))
    whole = {grade: large[1] - small[1] for grade, (small, large) in spent.items()}
    block = spent[False][1][0] - spent[False][0][0]
    work = Workload(
        "wan21_1_3b", 256, 256, 1, 20, 19, 1, 2, 1, False, 64 if trained == "attn" else None, "attn"
    )
    rest = forward_flops(work) - attention_flops(work)
    for grade in GRADES:
        mode = parse_recompute(grade).modes_of(1)[0]
        expected = repeated_flops(work, mode) - attention_flops(work) * (grade is True)
        assert (whole[grade] - whole[False]) / block == pytest.approx(expected / rest, abs=0.08), (
            grade
        )  # half text


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained", "rows", "frames"),
    [
        ("full", 1, 3),
        ("full", 2, 2),
        ("full", 4, 2),
        ("attn", 1, 6),
        ("attn", 2, 3),
        ("attn", 4, 2),
    ],
)
def test_activations_of_a_mid_size_build_are_within_15_percent(
    trained: str, rows: int, frames: int
) -> None:
    """Autograd keeps at least 300 MB, counted by saved-tensor hooks. For checkpointed builds,
    living tensors are counted."""
    counted, hooks = _counted(trained, rows, blocks=6, side=40, frames=frames)
    assert hooks >= 300e6
    assert hooks == pytest.approx(counted[False][1], rel=0.15)
    for grade, (kept, expected) in counted.items():
        assert kept == pytest.approx(expected, rel=0.15), grade


def _counted(
    trained: str, rows: int, blocks: int, side: int, frames: int
) -> tuple[dict[bool | str, tuple[int, float]], int]:
    """Grade -> (bytes that `blocks` keep, the model's figure) on real builds, by what one block
    more or less keeps; and what saved-tensor hooks see of them."""
    scale, builds = 4, (1, 1 + blocks)
    sizes: dict[bool | str, list[int]] = {grade: [] for grade in GRADES}
    hooks = []
    for count in builds:
        model, forward = _build(trained, rows, count, scale, side, frames)
        for grade in GRADES:
            model.disable_gradient_checkpointing()
            checkpointing.enable_recompute(model, list(model.blocks), parse_recompute(grade))
            sizes[grade].append(count_bytes(model, forward)[1].kept)
        model.disable_gradient_checkpointing()
        hooks.append(_saved(model, forward))
    rank = 64 if trained == "attn" else None
    work = Workload(
        "wan21_1_3b", side * 8, side * 8, 4 * frames - 3, 20, 19, 1, 2, 1, False, rank, "attn"
    )
    assert work.tokens == frames * side * side // 4
    results: dict[bool | str, tuple[int, float]] = {}
    for grade, (small, large) in sizes.items():
        mode = parse_recompute(grade).modes_of(1)[
            0
        ]  # casts of weights shrink with the square of the width
        weights = work.sizes["kept_bytes"][trained][mode]["forward"]
        kept = kept_bytes(work, mode, rows) - weights
        if mode == "all":
            # Facts are a GPU's. Here RMS norms (three of tokens, one of text) keep fp32 copies, and
            # autocast leaves layer norms in 16 bit.
            token, text = {"attn": (6, 2), "full": (8, 4)}[trained]
            kept += rows * 1536 * (token * work.tokens + text * 512)
        expected = blocks * (kept / scale + weights / scale**2)
        results[grade] = (large - small, expected)
    return results, hooks[1] - hooks[0]


def _build(
    trained: str,
    rows: int,
    blocks: int,
    scale: int,
    side: int,
    frames: int,
    compute: torch.dtype = torch.bfloat16,
) -> tuple[Any, Callable[[], torch.Tensor]]:
    """A random Wan of 1/scale of the 1.3B's width, and a forward of `rows` samples as the policy
    makes it; all weights compute in `compute`."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=12 // scale,
        ffn_dim=8960 // scale,
        num_layers=blocks,
        attention_head_dim=128,
    )
    dtype = torch.float32
    if trained != "full":
        dtype = torch.bfloat16
        model.to(dtype)
        inject_lora(model, LoraSpec(64 // scale, 1.0, (r"attn[12]\.(to_[qkv]|to_out\.0)",)))
    inputs = {
        "hidden_states": torch.randn(rows, 16, frames, side, side, dtype=dtype),
        "timestep": torch.full((rows,), 500.0),
        "encoder_hidden_states": torch.randn(rows, 512, 4096, dtype=dtype),
    }

    halves = trained == "full" and compute == torch.bfloat16

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, halves, cache_enabled=False):
            output: torch.Tensor = model(**inputs, return_dict=False)[0]
            return output

    return model, forward


def _saved(model: torch.nn.Module, forward: Callable[[], torch.Tensor]) -> int:
    """Unique bytes that saved-tensor hooks see, parameters excluded."""
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            seen[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(seen.values())


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("work", "vae", "latents"),
    [
        (replace(WAN, height=128, width=128, frames=9), "AutoencoderKLWan", (1, 16, 3, 16, 16)),
        (FLUX, "AutoencoderKL", (1, 16, 64, 64)),
        (replace(FLUX, height=1024, width=1024), "AutoencoderKL", (1, 16, 128, 128)),
    ],
)
def test_a_decode_without_tiles_holds_what_is_planned(
    work: Workload, vae: str, latents: tuple[int, ...]
) -> None:
    """Live bytes on fake tensors. At 480 x 832 x 81 Wan's decoder holds 7.6 GiB, where 3.3 were
    planned (H7 of the second reading); that count takes half a minute."""
    with FakeTensorMode():
        decoder: Any = getattr(diffusers, vae)(**(KL if vae == "AutoencoderKL" else {}))
        with torch.no_grad():
            _, held = count_bytes(decoder, lambda: decoder.decode(torch.empty(latents)).sample)
    small = 512 * 512 // (work.height * work.width * work.frames)  # decoded together
    planned = (decode_bytes(work) - vae_bytes(work)) / max(1, small)
    assert held.peak == pytest.approx(planned, rel=0.05)


def test_lora_and_full_memory_differ_as_they_should() -> None:
    full = Workload("flux1_dev", 512, 512, 1, 6, 5, 48, 24, 2, False, None)
    assert (
        trainer_memory(full, TrainerLoad(1, 1, 1, False, False), INPUTS).total
        > 16 * full.sizes["parameters"]
    )
    assert trainer_memory(FLUX, TrainerLoad(1, 1, 1, False, False), INPUTS).total < 40 * 2**30
    assert trainer_memory(
        FLUX, TrainerLoad(1, 2, 4, False, False), Recompute()
    ).activations == pytest.approx(
        8 * trainer_memory(FLUX, TrainerLoad(1, 1, 1, False, False), Recompute()).activations,
        rel=0.05,
    )


def test_a_gpu_keeps_no_copy_of_a_norm_and_no_products_of_attention() -> None:
    """Facts are counted so, on a device that does not exist."""
    with FakeTensorMode():
        norm = torch.nn.RMSNorm(128, dtype=torch.bfloat16, device="cuda")
        given = torch.empty(2, 8, 512, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        _, held = count_bytes(norm, lambda: norm(given))
        assert held.kept == pytest.approx(2 * given.numel(), rel=0.02)  # what it returns
        _, held = count_bytes(norm, lambda: attend(given, given, given))
        assert held.kept == pytest.approx(2 * given.numel(), rel=0.02)


@pytest.mark.parametrize(
    ("experiment", "text", "task", "measured"),
    [("flux1_flowgrpo", 128, 2, 81.215), ("sd35_flowgrpo", 77 + 128, 4, 43.5854)],
)
def test_a_plan_holds_what_a_gpu_held(
    experiment: str, text: int, task: int, measured: float
) -> None:
    """Peak GiB of PyTorch's allocator in runs of `benchmarks.real_run` on an NVIDIA H200, torch
    2.11, 2026-11-26: K=5, nothing recomputed. The scorer was a tiny one; the allocator does not
    see what is reserved."""
    work = workload_of(load([f"experiment={experiment}", "hardware=single_gpu"]))
    assert work.text_tokens == text
    planned = trainer_memory(
        replace(work, evaluated=1), TrainerLoad(1, task, 5, True, False), Recompute()
    )
    assert 1.0 < (planned.total - planned.rewards - RESERVED) / GIB / measured < 1.1


@pytest.mark.parametrize(
    ("model", "most", "text"),
    [
        ("flux1_dev", None, 512),
        ("flux1_dev", 64, 64),
        ("sd35_medium", 256, 333),
        ("qwen_image", 512, 128),
        ("qwen_image", 64, 64),
    ],
)
def test_text_is_padded_or_cut_as_the_family_does(model: str, most: int | None, text: int) -> None:
    work = replace(FLUX, model=model, most_text=most)
    assert work.text_tokens == text
    half = replace(work, most_text=text // 2)
    assert attention_flops(half) < attention_flops(work)
    assert kept_bytes(half, "all", 2) < kept_bytes(work, "all", 2)


@pytest.mark.parametrize(("text", "tflops"), [(128, 15.791), (512, 21.416)])
def test_flops_follow_the_text(text: int, tflops: float) -> None:
    """FLUX.1 at 512 px. The first is counted by torch between the points of the facts."""
    work = replace(FLUX, most_text=text)
    assert forward_flops(work) / 1e12 == pytest.approx(tflops, rel=0.001)


def test_facts_are_counted_for_every_real_model_config(repository: Path) -> None:
    embedded = {"digits", "scenes", "scenes_edit", "scenes_student", "mixture"}
    names = {path.stem for path in (repository / "configs/model").glob("*.yaml")} - embedded
    assert names <= set(counted_models())
