"""DGPO: docs/algorithms.md section 3.14, against a closed form and an implementation that goes
sample by sample; what a group that does not meet is told."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from digenrl.config.errors import ConfigError
from digenrl.extensions.methods.dgpo import DGPO
from digenrl.extensions.methods.nft import OldPolicySchedule
from digenrl.types import CellBlock, TrainBatch
from tests.algorithms.fit import fit
from tests.algorithms.test_grpo import rows_of
from tests.algorithms.toy_policy import ToyPolicy, batch
from tests.extensions.methods.forward import (
    blocks_of,
    build,
    each_cell,
    gradient,
    shift,
    velocity,
)
from tests.extensions.methods.test_awm import REWARDS, features


def test_at_the_base_the_gradient_is_half_the_advantage_weighted_one() -> None:
    """s = 0 at the base, so every sample counts by sigmoid(0) = 1/2."""
    policy = ToyPolicy()
    module = build(DGPO, policy, beta=77.0)
    module.on_train_start()
    blocks = blocks_of(policy)
    found = gradient(module, batch(blocks, REWARDS, 24.0))
    policy.zero_grad()
    total = torch.zeros(())
    for block in blocks:
        group = REWARDS[block.group]
        advantages = (group - group.mean()) / (group.std(unbiased=False) + module.advantage.eps)
        for row, cells in enumerate(each_cell(block, "group", lambda number: 0)):
            for noisy, target, t in cells:
                error = ((velocity(policy, block, noisy, t) - target) ** 2).mean()
                total = total + 0.5 * advantages[row] * error / 24
    total.backward()
    wanted = torch.cat([p.grad.flatten() for p in policy.transformer.parameters()])
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-4)
    assert float(module.collect_metrics()["ratio_max_dev"]) == 0.0


@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_gradient_is_that_of_the_published_loss_sample_by_sample(clip: float | None) -> None:
    policy, old = ToyPolicy(), ToyPolicy()
    module = build(DGPO, policy, beta=20.0, ratio_clip=clip, kl_weight=0.1, max_advantage=1.2)
    for one in (policy, old):
        shift(one, 0.05)
    module.on_train_start()
    shift(policy, 0.1)
    blocks = blocks_of(policy)
    found = gradient(module, batch(blocks, REWARDS, 24.0))
    metrics = module.collect_metrics()
    assert "clip_fraction" not in metrics if clip is None else 0 < metrics["clip_fraction"] < 1
    policy.zero_grad()
    total = torch.zeros(())
    for block in blocks:
        group = REWARDS[block.group]
        advantages = ((group - group.mean()) / (group.std(unbiased=False) + 1e-4)).clamp(-1.2, 1.2)
        rows = each_cell(block, "group", lambda number: 0)
        for level in range(3):
            sum_of_group, kept = 0.0, []
            for row, cells in enumerate(rows):
                noisy, target, t = cells[level]
                new = velocity(policy, block, noisy, t)
                base = policy.base(features(policy, block, noisy, t))[0]
                error = ((new - target) ** 2).mean()
                with torch.no_grad():
                    before = ((velocity(old, block, noisy, t) - target) ** 2).mean()
                    ratio = math.exp(float(before - error))
                a = float(advantages[row])
                sum_of_group += a * float(error.detach() - ((base - target) ** 2).mean())
                gone = clip and (ratio > 1 + clip if a > 0 else ratio < 1 - clip)
                kept.append((0.0 if gone else a, error, ((new - base) ** 2).mean()))
            weight = 1 / (1 + math.exp(-20.0 / 4 * sum_of_group))
            total = total + sum(weight * a * error + 0.1 * kl for a, error, kl in kept) / 24
    total.backward()
    wanted = torch.cat([p.grad.flatten() for p in policy.transformer.parameters()])
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-4)


def test_the_old_policy_makes_rollouts_from_its_step_on() -> None:
    """old_rollouts_from=2: the versions 0 and 1 are of the present weights, version 2 is not."""
    policy = ToyPolicy()
    module = build(DGPO, policy, old_rollouts_from=2, old_policy=OldPolicySchedule(0, 1.0, 0.9))
    module.on_train_start()
    by_old = []
    for version in range(3):
        own = policy.adapter.trained_parameters()["2.bias"]
        by_old.append(module.rollout_parameters()["2.bias"] is not own)
        shift(policy, 0.1)
        module.after_update(batch(blocks_of(policy, version), version=version), changed=True)
    by_old.append(module.rollout_parameters()["2.bias"] is not own)
    assert by_old == [False, False, True, True]
    with module.rollout_weights():
        assert torch.equal(own, module._old.tensors["2.bias"])
    assert not torch.equal(own, module._old.tensors["2.bias"])


def test_a_part_of_a_group_is_refused() -> None:
    """The rule refuses it before ranks start, and so does the module itself."""
    policy = ToyPolicy()
    module = build(DGPO, policy)
    module.on_train_start()
    with pytest.raises(ValueError, match=r"sampling\.task_size=4"):
        module.training_step(batch([rows_of(blocks_of(policy)[0], 0, 2)], REWARDS), 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sampling.task_size=8"], r"sampling\.task_size=16"),
        (["data.group_size=32", "sampling.task_size=16"], r"sampling\.task_size=32"),
        (["data.updates_split=samples", "sampling.task_size=8"], "sampling.task_size=16"),
        (["data.updates_split=samples"], "data.updates_split=groups"),
    ],
)
def test_a_group_in_two_tasks_is_refused_before_ranks_start(words: list[str], said: str) -> None:
    from digenrl.config import load

    with pytest.raises(ConfigError, match=said):
        load(["experiment=digits_dgpo", *words])


def test_auto_keeps_a_group_together() -> None:
    from digenrl.advisor import PlainAdvisor
    from digenrl.config import load
    from digenrl.settle import settle_run

    words = ["experiment=digits_dgpo", "sampling.task_size=auto"]
    assert settle_run(load(words), PlainAdvisor()).settings.sampling.task_size == 16


def test_a_resumed_run_goes_on_with_the_old_policys_rollouts(tmp_path: Path) -> None:
    """Before its first update it knows its RL step by the epoch."""
    policy, again = ToyPolicy(), ToyPolicy()
    changes = {"old_rollouts_from": 2, "old_policy": OldPolicySchedule(0, 1.0, 0.9)}
    module = build(DGPO, policy, **changes)
    trainer, _ = fit(module, policy, cut, epochs=3)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    resumed = build(DGPO, again, **changes)
    assert not resumed.old_makes_rollouts
    fit(resumed, again, cut, epochs=3, ckpt_path=str(tmp_path / "x.ckpt"))
    for name, value in module.rollout_parameters().items():
        assert torch.equal(value, resumed.rollout_parameters()[name])
        assert not torch.equal(value, policy.adapter.trained_parameters()[name])


def cut(blocks: list[CellBlock], rewards: Tensor, step: int) -> list[TrainBatch]:
    return [batch(blocks, rewards, version=step)]
