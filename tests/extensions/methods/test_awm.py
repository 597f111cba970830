"""Advantage-weighted matching: docs/algorithms.md section 3.13, against closed forms and an
implementation that goes cell by cell."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from digenrl.extensions.methods.awm import AWM
from digenrl.extensions.methods.forward_losses import matching_value
from tests.algorithms.toy_policy import ToyPolicy, batch
from tests.extensions.methods.forward import (
    blocks_of,
    build,
    each_cell,
    gradient,
    shift,
    velocity,
)

REWARDS = torch.tensor([[0.1, 0.9, 0.4, 0.4], [1.0, 0.0, 0.2, 0.8]])


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("uniform", -4.0),
        ("t", -2.0),
        ("t2", -1.0),
        ("huber", -0.5 * (2.0 - 1e-5)),
        ("ghuber", -0.5 * (4.0**0.25 - 1e-10**0.25) / 0.25),
    ],
)
def test_values_of_a_known_error(kind: str, wanted: float) -> None:
    """An error of 4 at t = 1/2."""
    target = torch.zeros(1, 1, 2, 3)
    found = matching_value(target + 2.0, target, torch.tensor([[0.5]]), kind)
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(wanted, rel=1e-9)


def cell_by_cell(
    policy: ToyPolicy, module: AWM, start: ToyPolicy, old: ToyPolicy, rewards: Tensor
) -> Tensor:
    """The mean over all cells of the published loss (one forward for each cell and policy)."""
    losses = []
    for block in blocks_of(start):
        group = rewards[block.group]
        advantages = (group - group.mean()) / (group.std(unbiased=False) + module.advantage.eps)
        for row, cells in enumerate(each_cell(block, "forward")):
            weight = advantages[row].clamp(-2.0, 2.0).double() / 2.0
            for noisy, target, t in cells:
                with torch.no_grad():
                    before = velocity(start, block, noisy, t)
                    older = velocity(old, block, noisy, t)
                    base = old.base(features(old, block, noisy, t))[0]
                new = velocity(policy, block, noisy, t)
                value, start_value = (
                    -((((v.double() - target.double()) ** 2).mean() + 1e-10) ** 0.25) * t / 0.25
                    for v in (new, before)
                )
                ratio = torch.exp(value - start_value)
                loss = torch.maximum(-weight * ratio, -weight * ratio.clamp(0.98, 1.02))
                losses.append(
                    loss + 0.5 * ((new - older) ** 2).mean() + 0.2 * ((new - base) ** 2).mean()
                )
    return torch.stack(losses).mean()


def features(policy: ToyPolicy, block: object, noisy: Tensor, t: float) -> Tensor:
    """The input of the toy's base network."""
    rows = torch.tensor([t, float(block.condition["c"])]).expand(1, noisy.shape[0], 2)  # type: ignore[attr-defined]
    return torch.cat([noisy[None], rows], dim=-1)


def test_the_gradient_is_that_of_the_published_loss_cell_by_cell() -> None:
    """In the second update of a batch, with the clip, the old policy and the base at work."""
    policy, start, old = ToyPolicy(), ToyPolicy(), ToyPolicy()
    module = build(
        AWM,
        policy,
        kl_weight=0.2,
        old_weight=0.5,
        ratio_clip=0.02,
        max_advantage=2.0,
        updates_per_batch=2,
    )
    shift(old, 0.05)
    policy.load_state_dict(old.state_dict())
    module.on_train_start()  # the old policy is here
    for one in (start, policy):
        one.load_state_dict(old.state_dict())
        shift(one, 0.02)
    blocks = blocks_of(policy)
    module.training_step(batch(blocks, REWARDS), 0)  # the batch begins here
    shift(policy, 0.03)
    found = gradient(module, batch(blocks, REWARDS, 24.0, update=1))
    assert 0 < float(module.collect_metrics()["clip_fraction"]) < 0.5
    policy.zero_grad()
    cell_by_cell(policy, module, start, old, REWARDS).backward()
    wanted = torch.cat([p.grad.flatten() for p in policy.transformer.parameters()])
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-4)


def test_ratios_are_exactly_one_in_the_first_update_and_not_in_the_second() -> None:
    policy = ToyPolicy()
    shift(policy, 0.05)
    module = build(AWM, policy, updates_per_batch=2)
    module.on_train_start()
    blocks = blocks_of(policy)
    gradient(module, batch(blocks, REWARDS))
    assert float(module.collect_metrics()["ratio_max_dev"]) == 0.0
    gradient(module, batch(blocks, REWARDS, update=1))
    assert (
        float(module.collect_metrics()["ratio_max_dev"]) == 0.0
    )  # nothing was changed between them
    shift(policy, 0.05)
    gradient(module, batch(blocks, REWARDS, update=1))
    assert float(module.collect_metrics()["ratio_max_dev"]) > 1e-4


def test_arguments_are_checked() -> None:
    for changes, said in (
        ({"matching": "square"}, "ghuber or huber"),
        ({"ratio_clip": 1.5}, "ratio_clip"),
        ({"old_weight": -1.0}, "old_weight"),
        ({"kl_weight": -1.0}, "kl_weight >= 0"),
    ):
        with pytest.raises(ValueError, match=said):
            build(AWM, ToyPolicy(), **changes)
