"""The memory model against real modules: bytes of weights exactly, activations as saved-tensor hooks count them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from digenrl.simulate.memory import rollout_memory, saved_bytes, trainer_memory
from digenrl.simulate.workload import Workload, facts

WAN = Workload("wan21_1_3b", 240, 416, 33, 20, 19, 32, 4, 2, True, 32, "attn")
FLUX = Workload("flux1_dev", 512, 512, 1, 6, 5, 48, 24, 2, False, 64)


def test_flops_hit_the_counted_points_and_the_reference_between_them() -> None:
    """reference/models.md section 7: Wan2.1-14B 480x832x81 1678 TFLOP, FLUX 720 px 37.3, SD3.5 1024 px 10.9."""
    cases = [
        (Workload("wan21_14b", 480, 832, 81, 20, 19, 1, 2, 1, True, 32), 1678.0),
        (Workload("wan21_14b", 240, 416, 33, 20, 19, 1, 2, 1, True, 32), 97.7),
        (Workload("flux1_dev", 720, 720, 1, 16, 9, 1, 2, 1, False, None), 37.3),
        (Workload("hunyuan_video", 480, 640, 53, 16, 9, 1, 2, 1, False, None), 446.0),
        (Workload("sd35_medium", 1024, 1024, 1, 10, 9, 1, 2, 1, True, 32), 10.9),
    ]
    for work, tflops in cases:
        assert work.forward_flops() / 1e12 == pytest.approx(tflops, rel=0.01)


def test_weights_gradients_and_optimizer_are_exact() -> None:
    from diffusers import WanTransformer3DModel
    from peft import LoraConfig

    with torch.device("meta"):
        model = WanTransformer3DModel(num_attention_heads=12, ffn_dim=8960, num_layers=30, attention_head_dim=128)
        base = sum(p.numel() for p in model.parameters())
        model.requires_grad_(False)
        targets = r".*blocks\.\d+\.attn[12]\.(to_[qkv]|to_out\.0)"
        model.add_adapter(LoraConfig(r=32, lora_alpha=64, target_modules=targets))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == WAN.trained_parameters
    memory = trainer_memory(WAN, 1, 2, 1, True, False, False)
    assert (memory.frozen, memory.trained, memory.gradients, memory.optimizer) == (
        2 * base,
        4 * trained,
        4 * trained,
        8 * trained,
    )
    sharded = trainer_memory(WAN, 8, 2, 1, True, False, False)
    assert sharded.optimizer == 8 * -(-trained // 8)
    assert rollout_memory(WAN, 2).frozen == 2 * base


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("steps", "blocks", "side"),
    [(1, 6, 16), (2, 6, 16), *(pytest.param(k, 4, 24, marks=pytest.mark.slow) for k in (1, 2, 4))],
)
def test_activations_are_within_15_percent_of_saved_tensor_hooks(
    steps: int, blocks: int, side: int, checkpointing: bool
) -> None:
    """A random Wan of a quarter of the 1.3B's width, scaled: bytes are proportional to width and blocks."""
    from diffusers import WanTransformer3DModel

    scale, frames = 4, 5
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=12 // scale, ffn_dim=8960 // scale, num_layers=blocks, attention_head_dim=128
    ).bfloat16()
    model.train()
    if checkpointing:
        model.enable_gradient_checkpointing()
    inputs = {
        "hidden_states": torch.randn(steps, 16, frames, side, side, dtype=torch.bfloat16, requires_grad=True),
        "timestep": torch.full((steps,), 500.0),
        "encoder_hidden_states": torch.randn(steps, 512, 4096, dtype=torch.bfloat16),
    }
    counted = _kept(model, inputs, checkpointing)
    work = Workload("wan21_1_3b", side * 8, side * 8, 17, 20, 19, 1, 2, 1, False, None)
    assert work.tokens == frames * side * side // 4
    sizes = work.sizes
    if checkpointing:
        block = sizes["saved_bytes_per_block"]["full"]
        one = block["token"] * work.tokens + block["text"] * 512 + block["fixed"]
        expected = (saved_bytes(work, steps, True) - steps * one) * blocks / sizes["blocks"] / scale
    else:
        expected = saved_bytes(work, steps, False) * blocks / sizes["blocks"] / scale
    assert counted == pytest.approx(expected, rel=0.15)


def _kept(model: torch.nn.Module, inputs: dict[str, torch.Tensor], checkpointing: bool) -> int:
    """Bytes kept by all blocks: saved tensors, or (recomputed) the inputs of the blocks that checkpoints hold."""
    if checkpointing:
        sizes: list[int] = []
        hooks = [
            block.register_forward_pre_hook(lambda _, args: sizes.append(args[0].numel() * args[0].element_size()))
            for block in model.blocks  # type: ignore[union-attr]
        ]
        model(**inputs, return_dict=False)
        for hook in hooks:
            hook.remove()
        return sum(sizes)
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in owned:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**inputs, return_dict=False)
    return sum(seen.values())


def test_lora_and_full_memory_differ_as_they_should() -> None:
    full = Workload("flux1_dev", 512, 512, 1, 6, 5, 48, 24, 2, False, None)
    assert trainer_memory(full, 1, 1, 1, True, False, False).total > 16 * full.sizes["parameters"]
    assert trainer_memory(FLUX, 1, 1, 1, True, False, False).total < 40 * 2**30
    assert trainer_memory(FLUX, 1, 2, 4, False, False, False).activations == pytest.approx(
        8 * trainer_memory(FLUX, 1, 1, 1, False, False, False).activations
    )


def test_facts_are_counted_for_every_real_model_config(repository: Path) -> None:
    names = {path.stem for path in (repository / "configs/model").glob("*.yaml")} - {"digits"}
    assert names <= set(facts()["models"])
