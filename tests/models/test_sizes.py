"""Real architectures on the meta device: published sizes, and the adapters of the presets on them."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks.count_facts import MODELS
from digenrl.models.experts import Experts
from digenrl.models.lora import lora_modules
from tests.models.tiny_policies import FAMILIES

# Parameters in billions: Wan2.1 and HunyuanVideo reports, FLUX.1-dev, Qwen-Image and SD3.5 medium checkpoints;
# LoRA sizes in MB (bf16) at rank 32 of the presets, attention and attention with feed-forward.
REAL = {
    "wan21_14b": ("wan", 14.29, 210, 307),
    "wan21_1_3b": ("wan", 1.42, 47, 87),
    "wan21_i2v_14b": ("wan_i2v", 16.39, 262, 359),
    "wan22_a14b": ("wan22", 28.58, 420, 614),
    "hunyuan_video": ("hunyuan_video", 12.82, 110, 228),
    "hunyuan_video15": ("hunyuan_video15", 8.33, 113, 253),
    "ltx2": ("ltx2", 18.88, 264, 390),
    "flux1_dev": ("flux", 11.90, 105, 179),
    "flux1_kontext": ("flux_kontext", 11.90, 105, 179),
    "qwen_image": ("qwen_image", 20.43, 189, 425),
    "qwen_image_edit": ("qwen_image_edit", 20.43, 189, 425),
    "sd35_medium": ("sd3", 2.24, 37, 83),
    "aura_flow": ("aura_flow", 6.82, 63, 149),
    "z_image": ("z_image", 6.15, 59, 140),
    "flux2_klein_4b": ("flux2_klein", 3.88, 75, 96),
}


@pytest.mark.parametrize("name", REAL)
def test_parameters_and_adapters_of_the_real_architecture(name):
    family, billions, attention, attention_ff = REAL[name]
    with torch.device("meta"):
        network = MODELS[name]["build"](None)
    assert isinstance(network, (FAMILIES[family].transformer_class, Experts))
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count == pytest.approx(billions * 1e9, rel=0.01)
    shapes = {key: module for key, module in network.named_modules() if isinstance(module, torch.nn.Linear)}
    for preset, megabytes in (("attention", attention), ("attention_ff", attention_ff)):
        names = FAMILIES[family].lora_names(network.config, preset)
        assert sorted(lora_modules(network, [re.escape(key) for key in names[:8]])) == sorted(names[:8])
        size = sum(32 * (shapes[key].in_features + shapes[key].out_features) * 2 for key in names)
        assert size / 1e6 == pytest.approx(megabytes, rel=0.02), preset
    blocks = [block for key in FAMILIES[family].block_lists for block in getattr(network, key)]
    inside = sum(parameter.numel() for block in blocks for parameter in block.parameters())
    assert inside > 0.9 * count
