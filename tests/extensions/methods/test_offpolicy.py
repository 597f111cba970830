"""Off-policy corrections: docs/algorithms.md section 3.9 and check 22."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from digenrl.algorithms.surrogates import Cells, Clipped, Surrogate
from digenrl.extensions.methods.offpolicy import (
    CISPO,
    TOPR,
    DecoupledPPO,
    TruncatedIS,
    Uncorrected,
)
from digenrl.extensions.methods.surrogates import FlowDPPO, Guard
from tests.algorithms.fit import grpo
from tests.algorithms.toy_policy import ToyPolicy, batch, roll

LOG_RATIO = [-0.3, -0.05, 0.0, 0.05, 0.3, 2.0]
LOW, HIGH = 0.1, 0.04
"""Distances of the clip bounds from 1, unequal so that exchanged bounds show."""


def cells(advantage: float, proximal: Tensor | None = None) -> Cells:
    """One row of six cells whose log-ratios to the rollout are LOG_RATIO."""
    log_prob = torch.tensor([LOG_RATIO], dtype=torch.float64, requires_grad=True)
    ones = torch.ones_like(log_prob.detach())
    return Cells(
        log_prob=log_prob,
        old_log_prob=torch.zeros_like(ones),
        advantages=torch.full((1, 1), advantage, dtype=torch.float64),
        mean=torch.zeros(1, 6, 2, dtype=torch.float64),
        scale=ones,
        sqrt_h=ones,
        clip=(LOW, HIGH),
        old_mean=torch.zeros(1, 6, 2, dtype=torch.float64),
        proximal_log_prob=proximal,
    )


def weights(surrogate: Surrogate, made: Cells) -> Tensor:
    """Effective importance weight: -gradient / A per cell, [6]."""
    (gradient,) = torch.autograd.grad(surrogate.loss(made).sum(), made.log_prob)
    return (-gradient / made.advantages).flatten()


def ratios() -> Tensor:
    return torch.tensor(LOG_RATIO, dtype=torch.float64).exp()


@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_effective_weights(advantage: float) -> None:
    """Each correction's gradient is weight * A * grad(log-prob); the weights are the published
    ones."""
    r, positive = ratios(), advantage > 0
    inside = (r >= 1 - LOW) & (r <= 1 + HIGH)
    pessimistic = (r < 1 - LOW) if positive else (r > 1 + HIGH)
    expected = {
        Clipped(): torch.where(inside | pessimistic, r, 0.0),
        Uncorrected(): torch.ones_like(r),
        TruncatedIS(): r.clamp(max=1 + HIGH),
        TruncatedIS(cap=1.0): r.clamp(max=2.0),
        CISPO(): r.clamp(1 - LOW, 1 + HIGH),
        TOPR(): torch.ones_like(r) if positive else r.clamp(max=1.0),
    }
    seen = []
    for surrogate, weight in expected.items():
        got = weights(surrogate, cells(advantage))
        torch.testing.assert_close(got, weight, atol=1e-12, rtol=0)
        seen.append(got)
    for i, one in enumerate(seen):  # sensitivity: no two of them are the same function
        for other in seen[i + 1 :]:
            assert positive or not torch.equal(one, other)


@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_each_surrogate_says_what_it_cuts(advantage: float) -> None:
    """A cell is cut where the bound changes its gradient; `Uncorrected` has none to cut."""
    r, positive = ratios(), advantage > 0
    nothing = torch.zeros_like(r, dtype=torch.bool)
    above, below = r > 1 + HIGH, r < 1 - LOW
    # One cell moves by .05 up or down: out of the one bound, and within the other.
    proximal = torch.full((1, 6), 0.25 if positive else 0.35, dtype=torch.float64)
    moved = r / proximal.exp().flatten()
    far = replace(cells(advantage), old_mean=torch.ones(1, 6, 2, dtype=torch.float64))
    expected = [
        (Clipped(), cells(advantage), above if positive else below),
        (Guard(), cells(advantage), above if positive else below),
        (FlowDPPO(1e-5), cells(advantage), nothing),
        (FlowDPPO(1e-5), far, (r > 1) if positive else (r < 1)),
        (
            DecoupledPPO(cap=1.0),
            cells(advantage, proximal),
            (moved > 1 + HIGH) if positive else (moved < 1 - LOW),
        ),
        (DecoupledPPO(), cells(advantage, proximal), ~nothing),
        (TruncatedIS(), cells(advantage), above),
        (CISPO(), cells(advantage), above | below),
        (TOPR(), cells(advantage), nothing if positive else r > 1),
        (Uncorrected(), cells(advantage), nothing),
    ]
    for surrogate, made, mask in expected:
        assert torch.equal(surrogate.bounded_cells(made).flatten(), mask), surrogate


def test_decoupled_ppo_is_ppo_when_nothing_moved_since_the_rollout() -> None:
    """Check 22: logp_roll = logp_prox -> w = 1 and the loss is plain PPO's."""
    plain = cells(1.0)
    same = replace(plain, proximal_log_prob=plain.old_log_prob)
    assert torch.equal(DecoupledPPO().loss(same), Clipped().loss(plain))


def test_decoupled_ppo_clips_around_the_proximal_policy_and_caps_the_weight() -> None:
    """Check 22: a cell far from the rollout but at the proximal policy keeps min(r, cap); the cap
    of 2.0 holds."""
    made = cells(1.0)
    made = replace(made, proximal_log_prob=made.log_prob.detach())
    torch.testing.assert_close(
        weights(DecoupledPPO(cap=1.0), made), ratios().clamp(max=2.0), atol=1e-12, rtol=0
    )
    assert float(weights(DecoupledPPO(cap=1.0), made).max()) == 2.0
    assert not torch.allclose(weights(DecoupledPPO(cap=1.0), made), weights(Clipped(), made))


def test_requirements_are_declared() -> None:
    assert Guard().needs_means
    assert Guard().needs_gaussian
    assert FlowDPPO().needs_means
    assert not FlowDPPO().needs_gaussian
    assert DecoupledPPO().needs_proximal
    assert not any(
        s.needs_means or s.needs_proximal or s.needs_gaussian for s in (Clipped(), CISPO(), TOPR())
    )
    with pytest.raises(ValueError, match="cap"):
        TruncatedIS(cap=-1.0)
    with pytest.raises(ValueError, match="threshold"):
        FlowDPPO(0.0)


@pytest.mark.parametrize("empty", [False, True])
def test_decoupled_ppo_anchors_at_the_beginning_of_the_batch(empty: bool) -> None:
    """In the second update prox is the policy before the first one, not the present one."""
    policy = ToyPolicy()
    blocks = roll(policy)
    module = grpo(policy, surrogate=DecoupledPPO(), updates_per_batch=2)
    optimizer = module.configure_optimizers()
    if empty:  # the first update's cells were all another rank's
        module.policy.transformer[0].weight.grad = torch.ones_like(policy.transformer[0].weight)
        module.training_step(batch([], torch.rand(2, 4), 1.0), 0)
    else:
        module.training_step(batch(blocks), 0).backward()
    optimizer.step()
    assert module.training_step(batch(blocks, update=1), 1).isfinite()
    proximal = module._proximal_log_probs(blocks[0], batch(blocks, update=1))
    assert proximal is not None
    torch.testing.assert_close(proximal, blocks[0].log_probs, atol=1e-6, rtol=0)
    assert module._proximal_log_probs(blocks[0], batch(blocks, update=0)) is None
