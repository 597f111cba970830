"""Prompts without their padding: the same velocities, whoever else was encoded, and attention
without a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from digenrl.models.guidance import NEGATIVE
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.types import Prompt
from tests.models.tiny_policies import FAMILIES, MASKED, make, randomise_lora

pytestmark = pytest.mark.heavy

SHORT, LONG = (
    Prompt("a sign"),
    Prompt('a red circle on a blue background, and "a green square" beside it'),
)


def velocity(policy: DiffusersPolicy, condition: dict[str, Tensor]) -> Tensor:
    rows = len(condition["text"])
    latents = torch.randn(
        1, *policy.latent_shape, generator=torch.Generator().manual_seed(3)
    ).expand(rows, *policy.latent_shape)
    return policy.velocity(latents, torch.full((rows,), 0.5), condition)


def padded(policy: DiffusersPolicy, prompt: Prompt) -> dict[str, Tensor]:
    policy.keep_padding(True)
    condition = policy.codec.encode([prompt])
    assert (
        condition["text"].shape[1] == condition["mask"].shape[1] == policy.codec.max_sequence_length
    )
    return condition


@pytest.mark.parametrize("guided", [False, True], ids=["one-branch", "two-branches"])
@pytest.mark.parametrize("family", MASKED)
def test_velocities_and_gradients_are_those_of_the_padded_prompt(family: str, guided: bool) -> None:
    scale = {
        "true_cfg_scale" if FAMILIES[family].embedded_guidance else "guidance_scale": 4.0
        if guided
        else 1.0
    }
    policy = make(family, dtype="float64", **scale)
    randomise_lora(policy)
    cut = policy.codec.encode([LONG])
    assert cut["text"].shape[1] < policy.codec.max_sequence_length
    assert ("mask" in cut, NEGATIVE + "mask" in cut) == (guided, guided)
    found = velocity(policy, cut)
    found.square().sum().backward()
    gradients = {
        name: value.grad.clone()
        for name, value in policy.adapter.trained_parameters().items()
        if value.grad is not None
    }
    policy.zero_grad()
    expected = velocity(policy, padded(policy, LONG))
    expected.square().sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    for name, value in policy.adapter.trained_parameters().items():
        torch.testing.assert_close(gradients[name], value.grad, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("family", MASKED)
def test_a_row_does_not_depend_on_the_other_prompts(family: str) -> None:
    """Each of two prompts of a batch has its velocity; and a prompt alone has its bits, whatever
    was encoded before."""
    policy, other = (make(family, guidance_scale=1.0).eval() for _ in range(2))
    first = policy.codec.encode([SHORT])
    policy.codec.encode([LONG, SHORT])
    other.codec.encode([LONG])
    for again in (policy.codec.encode([SHORT]), other.codec.encode([SHORT])):
        assert all(torch.equal(first[key], again[key]) for key in first)
    both = policy.codec.encode([LONG, SHORT])
    with torch.no_grad():
        together = velocity(policy, both)
        swapped = velocity(policy, {key: value.flip(0) for key, value in both.items()})
        for row, prompt in enumerate((LONG, SHORT)):
            torch.testing.assert_close(
                together[row], velocity(policy, policy.codec.encode([prompt]))[0], atol=1e-6, rtol=0
            )
    assert torch.equal(together, swapped.flip(0))


@pytest.mark.parametrize("family", MASKED)
def test_attention_gets_no_mask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[Any] = []
    plain = functional.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        if not kwargs.get("is_causal"):  # nothing reads the padding behind it there
            masks.append(kwargs.get("attn_mask"))
        return plain(*args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    policy = make(family, guidance_scale=1.0)
    blocks = len(policy.wrap_units())
    with torch.no_grad():
        velocity(policy, policy.codec.encode([LONG]))
        assert masks[-blocks:] == [None] * blocks
        velocity(policy, padded(policy, LONG))
        assert all(mask is not None for mask in masks[-blocks:])
