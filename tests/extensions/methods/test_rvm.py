"""RVM: docs/algorithms.md section 3.15, against its closed form and cell by cell."""

from __future__ import annotations

import pytest
import torch

from digenrl.extensions.methods.forward_losses import rvm_loss
from digenrl.extensions.methods.noised import uniform_levels
from digenrl.extensions.methods.rvm import RVM
from tests.algorithms.test_grpo import rows_of, steps_of
from tests.algorithms.toy_policy import ToyPolicy, batch
from tests.extensions.methods.forward import (
    METHODS,
    blocks_of,
    build,
    each_cell,
    gradient,
    shift,
    velocity,
)
from tests.extensions.methods.test_awm import REWARDS, features


def test_the_loss_is_bounded_and_its_gradient_signed() -> None:
    """c*(v - target) + anchor*(v - reference), over the dimensions; never below 0."""
    v, target, reference = (
        torch.randn(2, 3, 2, 2, generator=torch.Generator().manual_seed(i)) for i in range(3)
    )
    v.requires_grad_()
    c = torch.tensor([[2.0], [-3.0]])
    loss = rvm_loss(v, target, c, reference, 0.5)
    assert float(loss.detach().min()) >= 0
    (found,) = torch.autograd.grad(loss.sum(), v)
    wanted = (c[..., None, None] * (v - target) + 0.5 * (v - reference)) / 4
    torch.testing.assert_close(found, wanted.detach())


def test_the_gradient_is_that_of_the_signed_loss_cell_by_cell() -> None:
    policy = ToyPolicy()
    module = build(RVM, policy, levels="grid", kl_weight=0.3, scale=0.2, max_advantage=1.2)
    shift(policy, 0.05)
    blocks = blocks_of(policy)
    found = gradient(module, batch(blocks, REWARDS, 24.0))
    policy.zero_grad()
    total = torch.zeros(())
    for block in blocks:
        group = REWARDS[block.group]
        advantages = ((group - group.mean()) / (group.std(unbiased=False) + 1e-4)).clamp(-1.2, 1.2)
        for row, cells in enumerate(each_cell(block, "forward")):
            for noisy, target, t in cells:
                new = velocity(policy, block, noisy, t)
                base = policy.base(features(policy, block, noisy, t))[0].detach()
                signed = 0.2 * float(advantages[row]) * ((new - target) ** 2).mean()
                total = total + 0.5 * (signed + 0.3 * ((new - base) ** 2).mean()) / 24
    total.backward()
    wanted = torch.cat([p.grad.flatten() for p in policy.transformer.parameters()])
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-4)


def test_levels_between_zero_and_one_belong_to_sample_and_step() -> None:
    """I11: the same in any micro-batch, different in every cell and RL step."""
    policy = ToyPolicy()
    block = blocks_of(policy)[0]
    whole = uniform_levels(block, 0)
    assert whole.shape == (4, 3)
    assert 0 < float(whole.min()) < float(whole.max()) < 1
    assert len(set(whole.flatten().tolist())) == 12
    assert torch.equal(uniform_levels(rows_of(block, 1, 3), 0), whole[1:3])
    assert torch.equal(uniform_levels(steps_of(block, 1, 2), 0), whole[:, 1:2])
    assert not torch.equal(uniform_levels(blocks_of(policy, step=1)[0], 0), whole)
    module = build(RVM, policy, kl_weight=0.1)
    cut = [rows_of(block, 0, 1), rows_of(block, 1, 4)]
    torch.testing.assert_close(
        gradient(module, batch(cut, REWARDS, 12.0)),
        gradient(module, batch([block], REWARDS, 12.0)),
        atol=1e-6,
        rtol=1e-4,
    )


@pytest.mark.parametrize("kind", METHODS)
def test_a_zero_advantage_gives_a_zero_gradient(kind: type) -> None:
    """Equal rewards move nothing, away from the base and the old policy too, and their cells are
    not useful."""
    policy = ToyPolicy()
    module = build(kind, policy)
    module.on_train_start()
    shift(policy, 0.1)
    equal = torch.full((2, 4), 0.7)
    found = gradient(module, batch(blocks_of(policy), equal, 24.0))
    assert float(found.abs().max()) == 0.0
    assert not bool(module.useful_samples({"reward": equal}, {"reward": 1.0}).any())
    some = module.useful_samples(
        {"reward": torch.tensor([[0.0, 1.0, 0.5, 0.5], [1.0] * 4])}, {"reward": 1}
    )
    assert [any(group) for group in some.tolist()] == [True, False]


@pytest.mark.parametrize("kind", METHODS)
def test_a_term_that_holds_the_policy_back_makes_every_sample_useful(kind: type) -> None:
    module = build(kind, ToyPolicy(), kl_weight=0.1)
    assert bool(module.useful_samples({"reward": torch.ones(2, 4)}, {"reward": 1.0}).all())


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="uniform or grid"):
        build(RVM, ToyPolicy(), levels="own")
    with pytest.raises(ValueError, match="scale > 0"):
        build(RVM, ToyPolicy(), scale=0.0)
