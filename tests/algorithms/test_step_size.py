"""Adam's eps beside the gradient: a warning with the factor, once, and none for a usual gradient."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch
from torch import nn

from digenrl.algorithms.base import PolicyModule
from digenrl.algorithms.step_size import small_gradient
from tests.algorithms.fit import grpo
from tests.algorithms.toy_policy import ToyPolicy, batch, roll


def test_the_factor_is_that_of_the_root_mean_square() -> None:
    weight = nn.Parameter(torch.ones(100))
    adam = torch.optim.AdamW([weight], eps=1e-6)
    told = small_gradient(adam, [weight], 1e-7 * 10)  # a root mean square of 1e-7
    assert told is not None
    assert "eps = 1e-06 is 10 times" in told
    assert "1e-07" in told
    assert "set algorithm.optimizer.eps to 1e-09 or less" in told
    # What is said is what Adam does: the first update is g / (|g| + eps).
    weight.grad = torch.full_like(weight, 1e-7)
    torch.optim.AdamW([weight], lr=1.0, eps=1e-6, weight_decay=0.0).step()
    assert float(1 - weight.detach()[0]) == pytest.approx(1 / 11, rel=1e-3)
    assert "0.091 of the learning rate" in told


def test_nothing_is_said_of_larger_gradients_of_none_and_of_other_optimizers() -> None:
    weight = nn.Parameter(torch.ones(100))
    adam = torch.optim.AdamW([weight], eps=1e-6)
    assert small_gradient(adam, [weight], 1e-5) is None
    assert small_gradient(adam, [weight], 0.0) is None
    assert small_gradient(torch.optim.SGD([weight], lr=1.0), [weight], 1e-30) is None


@pytest.mark.parametrize(("eps", "times"), [(1e3, 1), (1e-8, 0)])
def test_a_run_warns_once(eps: float, times: int, caplog: Any) -> None:
    policy = ToyPolicy()
    adam = functools.partial(torch.optim.AdamW, lr=1e-3, eps=eps)
    module = grpo(policy, optimizer=adam, ratio_bound=1.0)
    optimizer = module.configure_optimizers()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            optimizer.zero_grad()
            module.training_step(batch(roll(policy)), 0).backward()
            PolicyModule.configure_gradient_clipping(module, optimizer)
            optimizer.step()
    assert caplog.text.count("algorithm.optimizer.eps") == 2 * times  # the value and the remedy
