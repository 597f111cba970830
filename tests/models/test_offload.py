"""What waits on the host comes back as the same bits, and the device holds little of it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from digenrl.models import offload as activations
from tests.models.test_checkpointing import gradients
from tests.models.tiny_policies import FAMILIES, make

pytestmark = pytest.mark.heavy


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_waits_on_the_host_comes_back_as_the_same_bits(family: str) -> None:
    plain, _, spent = gradients(make(family, guidance_scale=4.0))
    for grade in ("offload", {"offload": 0.5, "inputs": 0.5}):
        found, _, flops = gradients(make(family, guidance_scale=4.0, gradient_checkpointing=grade))
        assert set(found) == set(plain)
        assert all(torch.equal(found[name], gradient) for name, gradient in plain.items()), grade
        assert (flops == spent) == (grade == "offload")


def test_the_device_holds_two_blocks_of_what_is_off_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing after the forward but what its caller holds; on the backward the block that computes
    and the next."""
    records: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0
    bring_back = activations._Kept._bring_back

    def watched(kept: Any) -> None:
        nonlocal most
        bring_back(kept)
        most = max(most, sum(bool(record._back) for record in records))

    class Watched(activations._Kept):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            records.add(self)

    monkeypatch.setattr(activations, "_Kept", Watched)
    monkeypatch.setattr(Watched, "_bring_back", watched)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    run, hidden = activations.Offload(), torch.randn(32, 64, requires_grad=True)
    loss = hidden
    for block in blocks:
        loss = loss + run(block, loss)
    originals = [reference for record in records for reference, _ in record._host]
    assert len(originals) == 6 * 3, "the input of each layer, and of the activation"
    loss = loss.sum()
    gc.collect()
    alive = sum(not reference.expired() for reference in originals)
    assert alive <= 1, "the test's own tensor"
    del originals
    loss.backward()
    gc.collect()
    assert most == 2
    assert not records, "the host's copies are freed with the graph"


def test_half_precision_autocast_offloads_the_same_bits() -> None:
    plain = gradients(make("flux", lora="full", dtype="bfloat16"))[0]
    found = gradients(
        make("flux", lora="full", dtype="bfloat16", gradient_checkpointing="offload")
    )[0]
    assert all(torch.equal(found[name], gradient) for name, gradient in plain.items())
