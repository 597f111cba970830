"""`benchmarks.flops`: what it counts as needed, and that it sees work that is done twice."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks import flops
from digenrl.rollout.engine import RolloutEngine

pytestmark = pytest.mark.heavy


def test_products_of_two_layers_by_hand() -> None:
    """Rows that nobody reads, and a weight that is not trained."""
    first, second = torch.nn.Linear(3, 5, bias=False), torch.nn.Linear(5, 7, bias=False)
    first.weight.requires_grad_(False)
    second.weight.requires_grad_(True)
    with flops.Products() as products:
        out = second(first(torch.randn(4, 3)))
    out[:1].sum().backward()
    (frozen, trained) = products.found
    assert (frozen.flops, frozen.backward) == (2 * 4 * 3 * 5, 0.0)
    assert (trained.flops, trained.backward, trained.read) == (2 * 4 * 5 * 7, 1.0, 0.25)


def test_attention_reads_neither_masked_keys_nor_dropped_rows() -> None:
    query, key, value = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[True, True, True, False]])
    with flops.Products() as products:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
    out[:, :, :2].sum().backward()
    (product,) = products.found
    assert product.flops == 2 * (2 * 2 * 4 * 4 * 8)
    assert product.read == pytest.approx(0.5 * 0.75)


@pytest.mark.parametrize("recipe", ["flux1_flowgrpo", "sd35_flowgrpo", "wan21_flowgrpo"])
def test_nothing_is_computed_twice_and_every_product_is_taken_down(recipe: str) -> None:
    found = flops.ratio(recipe)
    assert found.repeated == 0
    assert math.isclose(found.explained, 1.0, rel_tol=1e-3)
    assert found.generated == pytest.approx(found.forward, rel=1e-6), (
        "rows that nobody reads, alone"
    )
    # SD3.5's recipe trains the conditional branch alone: nothing goes back through the other.
    assert found.trained == pytest.approx(found.forward, rel=0.02)


def test_a_forward_that_is_made_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    once = RolloutEngine.take_step

    def twice(engine: RolloutEngine, generation: Any) -> Any:
        once(engine, generation)
        return once(engine, generation)

    monkeypatch.setattr(RolloutEngine, "take_step", twice)
    found = flops.ratio("wan21_flowgrpo")
    assert found.generated == pytest.approx(2.0)
    assert found.repeated > 0
