"""DiffusionNFT: docs/algorithms.md section 3.6 and check 13 on the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.algorithms.advantages import Advantage
from digenrl.diffusion.sde import FlowSDE
from digenrl.extensions.methods.nft import NFT, OldPolicySchedule
from digenrl.extensions.methods.noise_levels import NoiseLevels
from digenrl.types import CellBlock, TrainBatch
from tests.algorithms.fit import ADAMW, fit
from tests.algorithms.toy_policy import ToyPolicy, batch, roll


def nft(policy: ToyPolicy, **changes: Any) -> NFT:
    arguments: dict[str, Any] = {
        "sde": FlowSDE(0.0),
        "train_steps": NoiseLevels(size=3),
        "optimizer": ADAMW,
        "advantage": Advantage(),
        "old_policy": OldPolicySchedule(),
        "seed": 0,
        "kl_weight": 0.0,
    }
    return NFT(policy, **(arguments | changes))


def blocks_of(policy: ToyPolicy, step: int = 0) -> list[CellBlock]:
    return roll(policy, FlowSDE(0.0), NoiseLevels(size=3), step=step, version=step)


def gradient(module: NFT, item: TrainBatch) -> Tensor:
    module.zero_grad()
    module.training_step(item, 0).backward()
    return torch.cat(
        [p.grad.flatten() for p in module.policy.adapter.trained_parameters().values()]
    )


def test_schedules_of_verl_omni() -> None:
    """`copy` is 0. `linear_to_0_5` is min(0.001*step, 0.5). `delayed_linear_to_0_999` is 0 before
    step 75, then rises by 0.0075 a step up to 0.999."""
    assert OldPolicySchedule(ceiling=0.0).decay_after(1000) == 0.0
    assert OldPolicySchedule().decay_after(100) == pytest.approx(0.1)
    assert OldPolicySchedule().decay_after(900) == 0.5
    delayed = OldPolicySchedule(75, 0.0075, 0.999)
    assert delayed.decay_after(74) == 0.0
    assert delayed.decay_after(175) == pytest.approx(0.75)
    assert delayed.decay_after(1000) == 0.999
    with pytest.raises(ValueError, match="old_policy"):
        OldPolicySchedule(ceiling=1.0)


def test_gradient_at_the_old_policy_does_not_depend_on_beta() -> None:
    """Check 13 on the module: b scaling cancels at v_new = v_old, and only there."""
    policy = ToyPolicy()
    blocks = blocks_of(policy)
    modules = [nft(policy, beta=beta) for beta in (0.1, 1.0)]
    for module in modules:
        module.on_train_start()
    at_old = [gradient(module, batch(blocks)) for module in modules]
    torch.testing.assert_close(at_old[0], at_old[1], atol=1e-5, rtol=1e-4)
    assert float(at_old[0].norm()) > 1e-3
    with torch.no_grad():
        policy.transformer[2].bias.add_(0.3)
    away = [gradient(module, batch(blocks)) for module in modules]
    assert not torch.allclose(away[0], away[1], atol=1e-3)


def test_noise_is_keyed_so_that_the_cut_does_not_matter() -> None:
    """I11: the forward noise of a cell is the same in any micro-batch."""
    from tests.algorithms.test_grpo import rows_of, steps_of

    policy = ToyPolicy()
    blocks = blocks_of(policy)
    module = nft(policy, kl_weight=0.1)
    module.on_train_start()
    rewards = torch.rand(2, 4, generator=torch.Generator().manual_seed(5))
    whole = gradient(module, batch(blocks, rewards))
    cut = [
        rows_of(blocks[1], 0, 1),
        rows_of(blocks[1], 1, 4),
        steps_of(blocks[0], 0, 2),
        steps_of(blocks[0], 2, 3),
    ]
    torch.testing.assert_close(
        gradient(module, batch(cut, rewards, 24.0)), whole, atol=1e-6, rtol=1e-4
    )


def test_old_policy_generates_and_follows_after_the_batch() -> None:
    """Rollouts use the old policy: a copy that follows after the last update of an RL step, by its
    schedule."""
    policy = ToyPolicy()
    module = nft(policy, old_policy=OldPolicySchedule(ramp=1.0, ceiling=0.75), updates_per_batch=2)
    start = {
        name: value.detach().clone() for name, value in policy.adapter.trained_parameters().items()
    }
    module.on_train_start()
    optimizer = module.configure_optimizers()
    for version, expected_decay in ((0, 0.0), (1, 0.75)):
        old = {name: value.clone() for name, value in module.rollout_parameters().items()}
        for update in range(2):
            unchanged = module.rollout_parameters()
            assert all(torch.equal(old[name], unchanged[name]) for name in old)
            optimizer.zero_grad()
            module.training_step(
                batch(blocks_of(policy, version), update=update, version=version), update
            ).backward()
            optimizer.step()
        for name, value in module.rollout_parameters().items():
            now = policy.adapter.trained_parameters()[name].detach()
            torch.testing.assert_close(
                value, expected_decay * old[name] + (1 - expected_decay) * now
            )
            assert not torch.equal(now, start[name])
    with module.rollout_weights():
        inside = {
            name: value.detach().clone()
            for name, value in policy.adapter.trained_parameters().items()
        }
    assert all(
        torch.equal(inside[name], value) for name, value in module.rollout_parameters().items()
    )
    assert any(
        not torch.equal(inside[name], value)
        for name, value in policy.adapter.trained_parameters().items()
    )


def test_old_policy_follows_after_every_nth_batch() -> None:
    """`every=2`: after the second, the fourth ... RL step, as verl-omni counts them from one."""
    policy = ToyPolicy()
    module = nft(policy, old_policy=OldPolicySchedule(ceiling=0.0, every=2))
    module.on_train_start()
    followed = []
    for version in range(4):
        before = module.rollout_parameters()["2.bias"].clone()
        with torch.no_grad():
            policy.transformer[2].bias.add_(0.1)
        module.after_update(batch(blocks_of(policy, version), version=version), changed=True)
        followed.append(not torch.equal(module.rollout_parameters()["2.bias"], before))
    assert followed == [False, True, False, True]


def test_cells_that_stand_in_for_none_are_not_measured() -> None:
    """A rank without cells computes on stand-ins; their drift is no part of the metric."""
    policy = ToyPolicy()
    module = nft(policy, kl_weight=0.1)
    module.on_train_start()
    with torch.no_grad():
        policy.transformer[2].bias.add_(0.3)
    block = blocks_of(policy)[0]
    for live in (True, False):
        module.cell_losses(block, torch.zeros(block.samples), batch([block]), live)
        found = module._meters.collect_metrics()
        assert ("velocity_drift" in found) is live
        if live:  # the bias is added to every value of the velocity
            assert float(found["velocity_drift"]) == pytest.approx(0.3**2, rel=1e-4)
        assert ("kl" in found) is live
    assert not found


def test_old_policy_survives_a_restart(tmp_path: Any) -> None:
    def cut(blocks: list[CellBlock], rewards: Tensor, step: int) -> list[TrainBatch]:
        return [batch(blocks, rewards, version=step)]

    schedule = OldPolicySchedule(ramp=1.0, ceiling=0.75)
    policy, again = ToyPolicy(), ToyPolicy()
    module = nft(policy, old_policy=schedule)
    trainer, steps = fit(module, policy, cut, epochs=3)
    assert "ratio_max_dev" not in steps[0]
    assert module.first_ratio_max_dev is None
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    resumed = nft(again, old_policy=schedule)
    fit(resumed, again, cut, epochs=3, ckpt_path=str(tmp_path / "x.ckpt"))
    for name, value in module.rollout_parameters().items():
        assert torch.equal(value, resumed.rollout_parameters()[name])
        assert not torch.equal(value, policy.adapter.trained_parameters()[name])


def test_a_block_without_clean_latents_is_explained() -> None:
    policy = ToyPolicy()
    module = nft(policy)
    module.on_train_start()
    block = blocks_of(policy)[0]
    from dataclasses import replace

    with pytest.raises(ValueError, match="clean latents"):
        module.training_step(batch([replace(block, final=None)]), 0)
    assert module.needs_final
    with pytest.raises(ValueError, match="beta > 0"):
        nft(policy, beta=0.0)


@pytest.mark.parametrize(
    ("schedule", "updates", "told"),
    [
        (OldPolicySchedule(delay=75), 1, True),  # a copy of the policy for 75 RL steps
        (OldPolicySchedule(ceiling=0.0), 1, True),
        (OldPolicySchedule(), 1, False),  # DiffusionNFT's own: equal after the first step alone
        (OldPolicySchedule(delay=75), 2, False),  # the second update has moved on
    ],
)
def test_a_run_whose_loss_contrasts_nothing_is_warned_once(
    schedule: OldPolicySchedule, updates: int, told: bool, caplog: Any
) -> None:
    def cut(blocks: list[CellBlock], rewards: Tensor, step: int) -> list[TrainBatch]:
        return [batch(blocks, rewards, update=u, version=step) for u in range(updates)]

    policy = ToyPolicy()
    module = nft(policy, old_policy=schedule, updates_per_batch=updates)
    _, steps = fit(module, policy, cut, epochs=5)
    assert caplog.text.count("equalled its old copy") == told
    drifts = [step["velocity_drift"] for step in steps]
    assert all(drift == 0.0 for drift in drifts) is (told and updates == 1)
