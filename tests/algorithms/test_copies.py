"""Moving averages and swaps: docs/algorithms.md check 23."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from digenrl.algorithms.copies import Ema, ParameterCopy


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(3, 2, generator=generator)) for name in ("a", "b")}


def test_decay_sequence() -> None:
    """Check 23: min((1+n)/(10+n), d)."""
    ema = Ema(decay=0.9, every=1)
    assert [ema.decay_at(n) for n in (1, 2, 8, 1000)] == [2 / 11, 3 / 12, 9 / 18, 0.9]
    assert Ema(decay=0.9, every=1, times=3).decay_at(8) == (9 / 18) ** 3


def test_average_follows_every_kth_step() -> None:
    own, ema = parameters(), Ema(decay=0.9, every=3)
    ema.begin_average(own)
    expected = own["a"].detach().clone()
    for n in range(1, 7):
        with torch.no_grad():
            own["a"].add_(1.0)
        ema.update_average(own)
        if n in (2, 5):
            decay = min((1 + n) / (10 + n), 0.9)
            expected = decay * expected + (1 - decay) * own["a"].detach()
    torch.testing.assert_close(ema.copy.tensors["a"], expected)
    assert not torch.allclose(expected, own["a"].detach())


def check_swap(copy: ParameterCopy) -> None:
    own = parameters()
    copy.follow_parameters(own, 0.0)
    frozen = {name: value.clone() for name, value in copy.tensors.items()}
    with torch.no_grad():
        for value in own.values():
            value.mul_(1.1)
    before = {name: value.detach().clone() for name, value in own.items()}
    storage = own["a"].data_ptr()
    with copy.swapped_into(own):
        assert all(torch.equal(own[name], frozen[name]) for name in own)
    assert all(torch.equal(own[name], before[name]) for name in own)
    assert own["a"].data_ptr() == storage
    assert all(torch.equal(copy.tensors[name], frozen[name]) for name in own)


def test_swap_in_and_out_restores_bits() -> None:
    """Check 23: cloned, never aliased: `.detach().cpu()` of a CPU tensor is the live weight."""
    check_swap(ParameterCopy())

    class Aliased(ParameterCopy):
        def follow_parameters(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
            self.tensors = {name: value.detach().cpu() for name, value in parameters.items()}

    with pytest.raises(AssertionError):
        check_swap(Aliased())


def test_swap_restores_after_an_exception_and_an_empty_copy_changes_nothing() -> None:
    own, copy = parameters(), ParameterCopy()
    before = own["a"].detach().clone()
    with copy.swapped_into(own):
        assert torch.equal(own["a"], before)
    copy.load_state_dict({name: torch.zeros(3, 2) for name in own})

    def fail() -> None:
        with copy.swapped_into(own):
            assert float(own["a"].detach().abs().sum()) == 0.0
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert torch.equal(own["a"], before)


def test_a_swap_between_forward_and_backward_leaves_gradients_alone() -> None:
    """NFT swaps the old policy in beside a recorded graph."""
    own, copy = parameters(), ParameterCopy()
    copy.load_state_dict({name: torch.zeros(3, 2) for name in own})
    x = torch.ones(2, 3)
    reference = torch.autograd.grad(
        (x @ own["a"] @ own["b"].T).square().sum(), [own["a"], own["b"]]
    )
    loss = (x @ own["a"] @ own["b"].T).square().sum()
    with torch.no_grad(), copy.swapped_into(own):
        assert float((x @ own["a"]).sum()) == 0.0
    for got, expected in zip(
        torch.autograd.grad(loss, [own["a"], own["b"]]), reference, strict=True
    ):
        assert torch.equal(got, expected)


def test_state_survives_a_checkpoint() -> None:
    own, copy, other = parameters(), ParameterCopy(), ParameterCopy()
    copy.follow_parameters(own, 0.0)
    state = copy.state_dict()
    other.load_state_dict(state)
    state["a"].zero_()
    assert torch.equal(other.tensors["a"], own["a"].detach())
    assert Ema(decay=0.0).decay_at(3) == 0.0
    with pytest.raises(ValueError, match="decay"):
        Ema(decay=1.0)
    with pytest.raises(ValueError, match="times >= 1"):
        Ema(times=0)
