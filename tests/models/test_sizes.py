"""Real architectures on the meta device: published sizes, and the adapters of the presets on
them."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks import _families
from benchmarks.count_facts import PRESETS
from digenrl.models.lora import lora_modules
from tests.models.tiny_policies import FAMILIES, ROWS

pytestmark = pytest.mark.heavy

PUBLISHED = {
    name: (family, *sizes) for family, row in ROWS.items() for name, sizes in row.published.items()
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_adapters_of_the_real_architecture(name):
    family, billions, attention, attention_ff = PUBLISHED[name]
    with torch.device("meta"):
        network = _families.network(name)
    parts = [network.get_submodule(name[:-1]) for name in FAMILIES[family].components.values()]
    assert all(isinstance(part, FAMILIES[family].transformer_class) for part in parts)
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count == pytest.approx(billions * 1e9, rel=0.01)
    shapes = {
        key: module
        for key, module in network.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    counted = _families.models()[name].models[name]["lora_parameters_per_rank"]
    for key, megabytes in (("attn", attention), ("attn_ff", attention_ff)):
        preset = PRESETS[key]
        names = FAMILIES[family].lora_names(network.config, preset)
        assert sorted(lora_modules(network, [re.escape(each) for each in names[:8]])) == sorted(
            names[:8]
        )
        size = sum(shapes[layer].in_features + shapes[layer].out_features for layer in names)
        assert 32 * size * 2 / 1e6 == pytest.approx(megabytes, rel=0.02), preset
        assert counted[key] == size, "python -m benchmarks.count_facts counts it"
    blocks = [block for key in FAMILIES[family].block_lists for block in getattr(network, key)]
    inside = sum(parameter.numel() for block in blocks for parameter in block.parameters())
    assert inside > 0.9 * count


@pytest.mark.parametrize(
    "name", [name for name, facts in _families.models().items() if "period" in facts.models[name]]
)
def test_a_period_stands_for_all_blocks(name):
    """The planner's bytes of a block are the mean of so many (`benchmarks.count_facts`)."""
    sizes = _families.models()[name].models[name]
    with torch.device("meta"):
        small, large, whole = (
            _families.network(name, blocks) for blocks in (1, 1 + sizes["period"], None)
        )
    counts = [sum(p.numel() for p in each.parameters()) for each in (small, large, whole)]
    mean = (counts[1] - counts[0]) / sizes["period"]
    assert (counts[2] - counts[0]) / (sizes["blocks"] - 1) == pytest.approx(mean, rel=0.01)
