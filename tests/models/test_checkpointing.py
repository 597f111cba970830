"""Graded activation checkpointing: the same gradients, bit by bit, from fewer bytes and more
FLOPs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.live_bytes import count_bytes
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.recompute import Recompute, parse_recompute
from tests.models.tiny_policies import FAMILIES, make, prompt, randomise_lora

pytestmark = pytest.mark.heavy

GRADES = [False, 0.5, "products", "attention", True]


def gradients(policy: DiffusersPolicy) -> tuple[dict[str, torch.Tensor], int, int]:
    """Gradients of one velocity, bytes that autograd kept for them, and FLOPs of forward and
    backward."""
    randomise_lora(policy)
    condition = policy.codec.encode([prompt("a red star")] * 2)
    noise = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(3))
    sigma = torch.tensor([0.9, 0.4])
    with FlopCounterMode(display=False) as counter:
        loss, held = count_bytes(
            policy, lambda: policy.velocity(noise, sigma, condition).square().mean()
        )
        loss.backward()
    found = {
        name: parameter.grad for name, parameter in policy.adapter.trained_parameters().items()
    }
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


@pytest.mark.parametrize(
    "grades",
    [("attention",), pytest.param(("products", True), marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.slow
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
    assert (
        parse_recompute({"products": 0.75, "attention": 0.25}).modes_of(8).count("attention") == 2
    )
    assert parse_recompute(0.25).modes_of(8) == (
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
