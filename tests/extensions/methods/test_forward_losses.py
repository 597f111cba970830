"""Losses of the forward process against closed forms: docs/algorithms.md section 7, checks 13 and
14, with mutations."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from digenrl.extensions.methods import forward_losses as losses
from tests.algorithms.test_objectives import SHAPE, normal, uniform

# ---- check 13


def nft_setup() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    clean, eps = normal(3, 1, *SHAPE), normal(3, 2, *SHAPE, seed=1)
    sigma = torch.tensor([[0.3, 0.8]], dtype=torch.float64)
    noisy = (1 - sigma[..., None, None]) * clean + sigma[..., None, None] * eps
    velocity = eps - clean + 0.1 * normal(3, 2, *SHAPE, seed=2)
    return velocity, noisy, clean, sigma, torch.tensor([[2.0], [-1.0], [0.0]], dtype=torch.float64)


def adaptive_x0_loss(velocity: Tensor, noisy: Tensor, clean: Tensor, sigma: Tensor) -> Tensor:
    difference = noisy - sigma[..., None, None] * velocity - clean
    return (difference**2).flatten(2).mean(2) / difference.detach().abs().flatten(2).mean(2).clamp(
        min=1e-5
    )


def check_nft(loss: Callable[..., Tensor], beta: float) -> None:
    velocity, noisy, clean, sigma, advantages = nft_setup()
    new = velocity.clone().requires_grad_()
    (got,) = torch.autograd.grad(
        loss(new, velocity, noisy, clean, sigma, advantages, beta, 5.0).sum(), new
    )
    leaf = velocity.clone().requires_grad_()
    plain = adaptive_x0_loss(leaf, noisy, clean, sigma)
    (expected,) = torch.autograd.grad((advantages * plain).sum(), leaf)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
    assert float(got[2].abs().max()) < 1e-14  # rw = 0.5: no gradient


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0])
def test_nft_gradient_at_the_old_policy(beta: float) -> None:
    """Check 13: at v_new = v_old the gradient is A*grad(adaptive x0 loss), whatever beta."""
    check_nft(losses.nft_loss, beta)
    with pytest.raises(AssertionError):  # M missing
        check_nft(lambda *args: losses.nft_loss(*args) / 5.0, beta)
    with pytest.raises(AssertionError):  # preference inverted
        check_nft(lambda v, o, x, c, s, a, b, m: losses.nft_loss(v, o, x, c, s, -a, b, m), beta)


def test_nft_finite_difference() -> None:
    velocity, noisy, clean, sigma, advantages = nft_setup()
    old = velocity + 0.05 * normal(3, 2, *SHAPE, seed=9)
    weights = [
        (noisy - sigma[..., None, None] * v - clean).abs().flatten(2).mean(2)
        for v in (0.5 * velocity + 0.5 * old, 1.5 * old - 0.5 * velocity)
    ]

    def frozen_weights(v: Tensor) -> Tensor:
        rw = losses.nft_reward_weight(advantages, 5.0)
        t = sigma[..., None, None]
        p = ((noisy - t * (0.5 * v + 0.5 * old) - clean) ** 2).flatten(2).mean(2) / weights[0]
        n = ((noisy - t * (1.5 * old - 0.5 * v) - clean) ** 2).flatten(2).mean(2) / weights[1]
        return ((rw * p + (1 - rw) * n) * 10.0).sum()

    leaf = velocity.clone().requires_grad_()
    loss = losses.nft_loss(leaf, old, noisy, clean, sigma, advantages, 0.5, 5.0).sum()
    torch.testing.assert_close(loss.detach(), frozen_weights(velocity))
    (gradient,) = torch.autograd.grad(loss, leaf)
    direction = normal(3, 2, *SHAPE, seed=5)
    slope = (
        frozen_weights(velocity + 1e-6 * direction) - frozen_weights(velocity - 1e-6 * direction)
    ) / 2e-6
    assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=1e-6)


def test_nft_reward_weights() -> None:
    """Check 13: A = +-M maps to 1 and 0, 0 to one half, beyond clamps."""
    advantages = torch.tensor([5.0, -5.0, 0.0, 9.0, -9.0, 2.5])
    expected = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0, 0.75])
    assert torch.equal(losses.nft_reward_weight(advantages, 5.0), expected)


# ---- check 14


def check_dpo(loss: Callable[..., Tensor]) -> None:
    chosen, rejected = (uniform(3, 2, seed=seed).requires_grad_() for seed in (0, 1))
    same = loss(chosen, rejected, chosen.detach(), rejected.detach(), 100.0)
    torch.testing.assert_close(same.detach(), torch.full_like(same, math.log(2.0)))
    down, up = torch.autograd.grad(same.sum(), [chosen, rejected])
    assert bool((down > 0).all())  # descent lowers the error of the chosen one
    assert bool((up < 0).all())
    torch.testing.assert_close(down, torch.full_like(down, 100.0 / 4))
    swapped = loss(rejected, chosen, rejected.detach(), chosen.detach(), 100.0)
    flipped, _ = torch.autograd.grad(swapped.sum(), [chosen, rejected])
    torch.testing.assert_close(flipped, -down)


@pytest.mark.parametrize("beta", [1.0, 100.0])
def test_dpo_closed_form(beta: float) -> None:
    """Section 3.7: log(1 + exp(beta/2 * ((e_w - e_w_ref) - (e_l - e_l_ref)))), away from the
    reference too."""
    w, l, w_ref, l_ref = (uniform(3, 2, seed=seed) for seed in range(4))
    margin = beta / 2 * ((w - w_ref) - (l - l_ref))
    torch.testing.assert_close(losses.dpo_loss(w, l, w_ref, l_ref, beta), torch.log1p(margin.exp()))
    assert (
        float((losses.dpo_loss(w, l, l_ref, w_ref, beta) - torch.log1p(margin.exp())).abs().max())
        > 1e-2
    )


def test_dpo() -> None:
    """Check 14: log 2 at the reference, e_w falls and e_l rises, swapping the pair flips the
    sign."""
    check_dpo(losses.dpo_loss)
    with pytest.raises(AssertionError):
        check_dpo(lambda w, l, rw, rl, b: losses.dpo_loss(l, w, rl, rw, b))
    with pytest.raises(AssertionError):
        check_dpo(lambda w, l, rw, rl, b: losses.dpo_loss(w, l, rw, rl, 2 * b))
