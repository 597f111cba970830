"""Graded activation checkpointing: the same gradients, bit by bit, from fewer bytes and more
FLOPs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.live_bytes import count_bytes
from digenrl.models import offload
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.recompute import Recompute, parse_recompute
from tests.models.tiny_policies import FAMILIES, make, prompt, randomise_lora

pytestmark = pytest.mark.heavy

GRADES = [False, 0.5, "products", "attention", True]


def gradients(policy: DiffusersPolicy) -> tuple[dict[str, torch.Tensor], int, int]:
    """Gradients of one velocity, bytes that autograd kept for them, and FLOPs of forward and
    backward."""
    randomise_lora(policy)
    condition = policy.encode([prompt("a red star")] * 2)
    noise = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(3))
    sigma = torch.tensor([0.9, 0.4])
    with FlopCounterMode(display=False) as counter:
        loss, held = count_bytes(
            policy, lambda: policy.velocity(noise, sigma, condition).square().mean()
        )
        loss.backward()
    found = {name: parameter.grad for name, parameter in policy.trained_parameters().items()}
    return (
        {name: grad for name, grad in found.items() if grad is not None},
        held.kept,
        counter.get_total_flops(),
    )


@pytest.mark.parametrize(
    "lora", [None, pytest.param("full", marks=pytest.mark.slow)], ids=["lora", "full"]
)
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name == "flux" else pytest.mark.slow) for name in FAMILIES],
)
def test_gradients_are_the_same_bits_and_fewer_bytes_are_kept(
    family: str, lora: str | None
) -> None:
    results = {
        grade: gradients(make(family, lora=lora, guidance_scale=4.0, gradient_checkpointing=grade))
        for grade in GRADES
    }
    plain = results[False][0]
    for grade, (found, _, _) in results.items():
        assert set(found) == set(plain)
        for name, gradient in plain.items():
            assert torch.equal(found[name], gradient), (grade, name)
    kept = {grade: count for grade, (_, count, _) in results.items()}
    assert kept[False] > kept["products"] > kept["attention"] > kept[True]
    assert kept[False] > kept[0.5] > kept[True]
    flops = {grade: count for grade, (_, _, count) in results.items()}
    assert flops[False] < flops[0.5] < flops[True]
    assert flops[False] <= flops["products"] < flops["attention"] < flops[True]


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
    bring_back = offload._Kept._bring_back

    def watched(kept: Any) -> None:
        nonlocal most
        bring_back(kept)
        most = max(most, sum(bool(record._back) for record in records))

    class Watched(offload._Kept):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            records.add(self)

    monkeypatch.setattr(offload, "_Kept", Watched)
    monkeypatch.setattr(Watched, "_bring_back", watched)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    run, hidden = offload.Offload(), torch.randn(32, 64, requires_grad=True)
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


@pytest.mark.parametrize(
    "grades",
    [("attention", "offload"), pytest.param(("products", True), marks=pytest.mark.slow)],
    ids=str,
)
def test_half_precision_autocast_recomputes_the_same_bits(grades: tuple[str | bool, ...]) -> None:
    plain = gradients(make("flux", lora="full", dtype="bfloat16"))[0]
    for grade in grades:
        found = gradients(
            make("flux", lora="full", dtype="bfloat16", gradient_checkpointing=grade)
        )[0]
        assert all(torch.equal(found[name], gradient) for name, gradient in plain.items()), grade


def test_values_mean_what_they_say() -> None:
    assert (
        parse_recompute(True)
        == parse_recompute("auto")
        == parse_recompute(1)
        == Recompute(inputs=1.0)
    )
    assert parse_recompute(None) == parse_recompute(False) == Recompute()
    assert parse_recompute({"products": 0.75, "attention": 0.25}).modes(8).count("attention") == 2
    assert parse_recompute(0.25).modes(8) == (
        "all",
        "all",
        "inputs",
        "all",
        "all",
        "all",
        "inputs",
        "all",
    )
    for value in (
        True,
        False,
        "products",
        "attention",
        "offload",
        0.5,
        {"products": 0.5, "offload": 0.25},
    ):
        assert parse_recompute(parse_recompute(value).config) == parse_recompute(value)
    for wrong in ("some", 1.5, {"everything": 1.0}, {"products": 0.7, "inputs": 0.7}):
        with pytest.raises(ValueError, match=r"model.gradient_checkpointing = .*"):
            parse_recompute(wrong)


def test_compiled_blocks_hide_the_operators_that_a_grade_would_choose_from() -> None:
    with pytest.raises(
        ValueError, match=r"model.gradient_checkpointing=products .* model.compile=false"
    ):
        make("wan", compile=True, gradient_checkpointing="products")
