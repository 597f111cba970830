"""LoRA targets that cannot be meant are refused before a rank starts, for every family."""

# Its experiments need digenrl.extensions.methods.
from __future__ import annotations

import time

import pytest
from hydra.utils import get_object
from torch import nn

from digenrl import parts
from digenrl.config import load
from digenrl.models.policy import Policy
from tests.models.tiny_policies import FAMILIES, make

WORDS = ["hardware=cpu_tiny"]


@pytest.mark.parametrize(
    "experiment", ["digits_flowgrpo", "scenes_flowgrpo", "sd35_flowgrpo", "wan22_a14b_flowgrpo"]
)
@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ("[attn.to_qq]", r"model\.lora\.targets: LoRA target 'attn\.to_qq' matches no linear"),
        ("['(to_q']", r"model\.lora\.targets: '\(to_q' is no regular expression"),
        ("['*']", r"model\.lora\.targets: '\*' is no regular expression"),
    ],
)
def test_targets_that_cannot_be_meant_are_refused(experiment: str, targets: str, said: str) -> None:
    words = [f"experiment={experiment}", *WORDS, f"model.lora.targets={targets}"]
    settings = load(words).settings
    with pytest.raises(ValueError, match=said):
        parts.check_parts(settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_outline_of_a_network_has_its_layers(family: str) -> None:
    policy = make(family)
    outline = type(policy).outline({"build": "tiny"})
    assert outline is not None
    assert all(each.is_meta for each in outline.parameters())
    linear = {name for name, each in outline.named_modules() if isinstance(each, nn.Linear)}
    assert policy.adapter.lora_layers
    assert set(policy.adapter.lora_layers) <= linear


def test_an_outline_of_a_large_model_is_quick() -> None:
    target = load(["experiment=wan21_flowgrpo", *WORDS]).settings.node_at("model")["_target_"]
    model: type[Policy] = get_object(target)
    began = time.process_time()
    model.outline({"build": "tiny"})
    assert time.process_time() - began < 2.0
