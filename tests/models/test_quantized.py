"""A frozen base in 4 or 8 bits: the adapter learns on it, and both sides have the same network."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from digenrl.cli.main import main
from tests.models.tiny_policies import FAMILIES, LORA, make, prompt

pytestmark = pytest.mark.heavy

BITS = {"nf4": 4, "int8": 8}
LIBRARY = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="nf4 needs bitsandbytes: pip install -e '.[quantized]'",
)
SOME = {"sd3", "flux", *(name for name, policy in FAMILIES.items() if len(policy.components) > 1)}


def velocity(policy, rows: int) -> torch.Tensor:
    noise = torch.Generator().manual_seed(1)
    latents = torch.randn(2, *policy.latent_shape, generator=noise)[:rows]
    condition = policy.codec.encode([prompt("a red cube"), prompt("two dogs")][:rows])
    return policy.velocity(latents, torch.tensor([0.5, 0.7])[:rows], condition)


@pytest.mark.parametrize("kind", [pytest.param("nf4", marks=LIBRARY), "int8"])
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in SOME else pytest.mark.slow) for f in FAMILIES]
)
def test_blocks_are_quantized_and_adapters_learn_on_them(family: str, kind: str) -> None:
    plain, small = (make(family, lora=LORA, quantize=q) for q in (None, kind))
    linear = [
        layer
        for block in small.wrap_units()
        for name, layer in block.named_modules()
        if isinstance(layer, nn.Linear) and "lora_" not in name
    ]
    assert linear
    numbers = sum(layer.in_features * layer.out_features for layer in linear)
    stored = sum(layer.weight.nelement() * layer.weight.element_size() for layer in linear)
    assert stored == numbers * BITS[kind] // 8
    assert not any(layer.weight.requires_grad for layer in linear)

    exact, coarse = velocity(plain, 2), velocity(small, 2)
    error = float(((coarse - exact).norm() / exact.norm()).detach())
    # These networks are tiny and random; the largest error seen in nf4 was .25.
    assert 0 < error < {"nf4": 0.35, "int8": 0.02}[kind]
    for made in (exact, coarse):
        made.square().mean().backward()
    learning = [
        {name for name, p in policy.named_parameters() if p.grad is not None and p.grad.any()}
        for policy in (plain, small)
    ]
    assert learning[0] == learning[1] != set()
    # A sample's velocity does not depend on the samples beside it.
    torch.testing.assert_close(velocity(small, 1), coarse[:1], atol=1e-5, rtol=1e-5)


def test_a_quantized_base_is_the_same_whenever_it_is_made() -> None:
    first, second = (make("flux", lora=LORA, quantize="int8").state_dict() for _ in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.slow
@pytest.mark.processes
def test_rollouts_and_trainers_share_a_quantized_base(tmp_path: Path) -> None:
    words = (
        "experiment=flux1_flowgrpo hardware=cpu_tiny model.quantize=int8 parallel.sharding=ddp "
        "allocation.trainers=1 allocation.rollouts=1 max_rl_steps=1 sampling.steps=3 "
        "callbacks.evaluation.max_prompts=1 callbacks.evaluation.samples_per_prompt=1"
    )
    assert main(["train", *words.split(), f"output_root={tmp_path}"]) == 0
    (summary,) = tmp_path.glob("*/*/summary.json")
    found = json.loads(summary.read_text())
    assert found["status"] == "completed"
    assert found["first_ratio_max_dev"] == 0.0
