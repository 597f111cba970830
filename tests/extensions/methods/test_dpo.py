"""Online DPO: docs/algorithms.md section 3.7 and check 14 on the module."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from digenrl.algorithms.advantages import Advantage
from digenrl.diffusion.sde import FlowSDE
from digenrl.extensions.methods.dpo import DPO, STREAM
from digenrl.extensions.methods.noise_levels import NoiseLevels
from digenrl.extensions.methods.noised import noise_cells
from digenrl.types import CellBlock
from tests.algorithms.fit import ADAMW
from tests.algorithms.toy_policy import ToyPolicy, batch, roll

REWARDS = torch.tensor([[0.1, 0.9, 0.4, 0.5], [0.7, 0.2, 0.3, 0.6]])
BEST, WORST = (1, 0), (0, 1)


def dpo(policy: ToyPolicy, **changes: Any) -> DPO:
    arguments: dict[str, Any] = {
        "sde": FlowSDE(0.0),
        "train_steps": NoiseLevels(size=3),
        "optimizer": ADAMW,
        "advantage": Advantage(),
        "seed": 0,
    }
    return DPO(policy, **(arguments | changes))


def blocks_of(policy: ToyPolicy) -> list[CellBlock]:
    return roll(policy, FlowSDE(0.0), NoiseLevels(size=3))


def errors(policy: ToyPolicy, block: CellBlock) -> tuple[float, float]:
    """Denoising error of the best and the worst sample, with the pair's shared noise."""
    rows = [BEST[block.group], WORST[block.group]]
    cells = noise_cells(block, rows, [0, 0], 0, STREAM)
    assert torch.equal(cells.noise[0], cells.noise[1])
    with torch.no_grad():
        error = ((cells.predict_velocity(policy) - cells.target) ** 2).flatten(1).mean(1)
    return float(error[0]), float(error[1])


def test_loss_is_log_two_at_the_reference() -> None:
    """Check 14: exactly log 2 per cell, however many cells the pair stands for."""
    policy = ToyPolicy()
    loss = dpo(policy).training_step(batch(blocks_of(policy), REWARDS), 0)
    assert float(loss.detach()) == pytest.approx(math.log(2.0), abs=1e-6)


def margins(
    policy: ToyPolicy, before: list[tuple[float, float]], blocks: list[CellBlock]
) -> list[float]:
    """How much the worst sample's error rose against the best one's, per group."""
    after = [errors(policy, block) for block in blocks]
    return [
        (worse[1] - worse[0]) - (old[1] - old[0]) for worse, old in zip(after, before, strict=True)
    ]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_training_prefers_the_best_sample_of_a_group(sign: float) -> None:
    """Check 14: e_w falls against e_l; with the rewards negated the pair swaps and the direction
    flips."""
    policy = ToyPolicy()
    blocks = blocks_of(policy)
    before = [errors(policy, block) for block in blocks]
    module = dpo(policy)
    optimizer = module.configure_optimizers()
    for _ in range(10):
        optimizer.zero_grad()
        module.training_step(batch(blocks, sign * REWARDS), 0).backward()
        optimizer.step()
    assert all(sign * margin > 1e-3 for margin in margins(policy, before, blocks))


def test_ties_have_no_gradient() -> None:
    policy = ToyPolicy()
    module = dpo(policy)
    module.training_step(batch(blocks_of(policy), torch.full((2, 4), 0.5)), 0).backward()
    assert all(
        float(p.grad.abs().max()) == 0.0
        for p in policy.adapter.trained_parameters().values()
        if p.grad is not None
    )


def test_a_sample_of_advantage_zero_makes_no_pair() -> None:
    """Neither as the better nor as the worse half: nothing says that it is."""
    policy = ToyPolicy()
    module = dpo(policy)
    block = blocks_of(policy)[0]
    for advantages, informative in (
        ([1.0, 0.5, 0.2, -1.0], 1.0),
        ([1.0, 0.5, 0.2, 0.0], 0.0),
        ([0.0, -0.1, -0.2, -1.0], 0.0),
    ):
        module.cell_losses(block, torch.tensor(advantages), batch([block]), live=True)
        assert float(module._meters.collect_metrics()["informative_pairs"]) == informative


def test_reference_is_refreshed_when_due() -> None:
    policy = ToyPolicy()
    module = dpo(policy, reference_every=2)
    optimizer = module.configure_optimizers()
    losses = []
    for version in range(3):
        optimizer.zero_grad()
        blocks = roll(policy, FlowSDE(0.0), NoiseLevels(size=3), step=version, version=version)
        loss = module.training_step(batch(blocks, REWARDS, version=version), 0)
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
    assert losses[1] != pytest.approx(math.log(2.0), abs=1e-6)
    assert losses[2] == pytest.approx(math.log(2.0), abs=1e-6)


def test_too_many_pairs_are_refused() -> None:
    policy = ToyPolicy()
    with pytest.raises(ValueError, match=r"pairs=3 needs at least 6 samples in a task, got 4"):
        dpo(policy, pairs=3).training_step(batch(blocks_of(policy), REWARDS), 0)
    with pytest.raises(ValueError, match="reference_every"):
        dpo(policy, reference_every=0)
