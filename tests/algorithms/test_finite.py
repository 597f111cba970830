"""What is not finite in a micro-batch is named."""

from __future__ import annotations

from digenrl.algorithms.finite import not_finite
from tests.algorithms.toy_policy import ToyPolicy, batch, roll


def test_what_is_not_finite_is_named() -> None:
    item = batch(roll(ToyPolicy()))
    assert not_finite(item) == []
    item.rewards["r"][0, 1] = float("nan")  # missing, no fault
    assert not_finite(item) == []
    item.rewards["r"][1, 0] = float("inf")
    item.blocks[1].log_probs[0, 0] = float("nan")
    assert not_finite(item) == ["reward/r", "1/log_probs"]
