"""The LightningModule: scaling, safety, metrics, checkpoints. Checks 2, 17, 22 of
docs/algorithms.md and I3, I4, I5."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.algorithms.copies import Ema
from digenrl.algorithms.grpo import GRPO
from digenrl.algorithms.objectives import rectified_weight
from digenrl.algorithms.surrogates import Cells, Clipped
from digenrl.diffusion import denoise
from digenrl.diffusion.sde import FlowSDE
from digenrl.diffusion.sigmas import static_grid
from digenrl.extensions.methods.sde import FlowCPS
from digenrl.extensions.methods.surrogates import FlowDPPO, Guard
from digenrl.types import CellBlock, TrainBatch
from tests.algorithms.fit import fit, grpo
from tests.algorithms.toy_policy import ToyPolicy, batch, roll


def rows_of(block: CellBlock, first: int, stop: int) -> CellBlock:
    """Samples first..stop-1 of a block."""
    pick = slice(first, stop)
    return replace(
        block,
        first_sample=block.first_sample + first,
        latents=block.latents[pick],
        next_latents=block.next_latents[pick],
        log_probs=block.log_probs[pick],
        means=None if block.means is None else block.means[pick],
        final=None if block.final is None else block.final[pick],
    )


def steps_of(block: CellBlock, first: int, stop: int) -> CellBlock:
    """Trained steps first..stop-1 of a block."""
    pick = slice(first, stop)
    return replace(
        block,
        steps=block.steps[pick],
        latents=block.latents[:, pick],
        next_latents=block.next_latents[:, pick],
        log_probs=block.log_probs[:, pick],
        means=None if block.means is None else block.means[:, pick],
    )


def gradient(module: GRPO, micro_batches: list[TrainBatch]) -> Tensor:
    module.zero_grad()
    for index, item in enumerate(micro_batches):
        module.training_step(item, index).backward()
    return torch.cat(
        [p.grad.flatten() for p in module.policy.adapter.trained_parameters().values()]
    )


@pytest.fixture
def moved() -> tuple[ToyPolicy, list[CellBlock], Tensor]:
    """An fp64 policy that has moved off its rollouts, so that ratios, clip and KL all matter."""
    policy = ToyPolicy(torch.float64)
    blocks = roll(policy, storage=torch.float64, sigmas=static_grid(6, 3.0).double())
    with torch.no_grad():
        for parameter in policy.adapter.trained_parameters().values():
            parameter.add_(
                0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
            )
    return policy, blocks, torch.rand(2, 4, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("surrogate", [Clipped(), Guard(), FlowDPPO(1e-4)])
def test_gradient_does_not_depend_on_how_cells_are_cut(surrogate: object, moved: tuple) -> None:
    """Check 17, I3, I5: K micro-batches of unequal size == one big mean; each divided by the
    update's own denominator."""
    policy, blocks, rewards = moved
    module = grpo(policy, surrogate=surrogate, kl_weight=0.1)
    whole = gradient(module, [batch(blocks, rewards)])
    cells = float(sum(b.samples * len(b.steps) for b in blocks))
    parts = [
        rows_of(blocks[1], 1, 4),
        steps_of(blocks[0], 2, 5),
        rows_of(steps_of(blocks[0], 0, 2), 0, 3),
        rows_of(blocks[1], 0, 1),
        rows_of(steps_of(blocks[0], 0, 2), 3, 4),
    ]
    cut = [
        batch([parts[0]], rewards, cells),
        batch(parts[1:3], rewards, cells),
        batch(parts[3:], rewards, cells),
    ]
    torch.testing.assert_close(gradient(module, cut), whole, atol=1e-12, rtol=0)
    own = [
        replace(item, denominator=float(sum(b.samples * len(b.steps) for b in item.blocks)))
        for item in cut
    ]
    mean_of_means = gradient(module, own) / len(
        own
    )  # sensitivity: a fragment's own denominator is another gradient
    assert not torch.allclose(mean_of_means, whole, atol=1e-4)


def test_gradient_equals_the_formula(moved: tuple) -> None:
    """Check 2 with clip and KL: loss = mean over cells of max(-A*r, ...) + beta*KL, written out."""
    policy, blocks, rewards = moved
    module = grpo(policy, kl_weight=0.1)
    got = gradient(module, [batch(blocks, rewards)])
    total = torch.zeros((), dtype=torch.float64)
    for block in blocks:
        new = denoise.replay(policy, block, FlowSDE(0.7))
        with torch.no_grad(), policy.adapter.reference():
            base = denoise.replay(policy, block, FlowSDE(0.7))
        group = rewards[block.group].double()
        a = ((group - group.mean()) / (group.std(unbiased=False) + 1e-4)).float().double()[:, None]
        r = (new.log_prob - block.log_probs).exp()
        surrogate = torch.maximum(-a * r, -a * r.clamp(0.99, 1.01))
        kl = ((new.mean - base.mean) ** 2).flatten(2).mean(2) / (2 * (new.std * new.sqrt_h) ** 2)
        total = total + (surrogate + 0.1 * kl).sum()
    cells = sum(block.samples * len(block.steps) for block in blocks)
    expected = torch.autograd.grad(
        total / cells, list(policy.adapter.trained_parameters().values())
    )
    torch.testing.assert_close(got, torch.cat([g.flatten() for g in expected]), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["std", "longcat", "rectified"])
def test_losses_are_weighed_step_by_step(kind: str, moved: tuple) -> None:
    """std: the policy loss by std/sqrt(h), the KL not at all; longcat: by sqrt(s/(1-d))/sqrt(h),
    the KL by its square, the first step's d being sigmas[1]. Together they differ by the noise
    level alone."""
    policy, blocks, rewards = moved
    weighed = grpo(policy, kl_weight=0.1, step_weight=kind)
    total = torch.zeros_like(gradient(weighed, [batch(blocks, rewards)]))
    for block in blocks:
        for k in range(len(block.steps)):
            cells = [batch([steps_of(block, k, k + 1)], rewards, 40.0)]
            sigma, following = (float(block.sigmas[int(block.steps[k]) + i]) for i in (0, 1))
            guard = float(block.sigmas[1]) if int(block.steps[k]) == 0 else sigma
            w = (sigma / (1 - guard) / (sigma - following)) ** 0.5
            policy_part = gradient(grpo(policy), cells)
            kl_part = gradient(grpo(policy, kl_weight=0.1), cells) - policy_part
            flash = rectified_weight(FlowSDE(0.7), block.sigmas, block.steps)[k]
            own, of_kl = {"std": (0.7 * w, 1), "longcat": (w, w**2), "rectified": (flash, 1)}[kind]
            total += own * policy_part + of_kl * kl_part
    got = gradient(weighed, [batch(blocks, rewards, 40.0)])
    torch.testing.assert_close(got, total, atol=1e-10, rtol=1e-8)


def test_proximal_log_probs_are_those_of_the_weights_that_a_batch_begins_with() -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    class Watching(Clipped):
        needs_proximal = True

        def loss(self, cells: Cells) -> Tensor:
            assert cells.proximal_log_prob is not None
            seen.append((cells.proximal_log_prob, cells.log_prob.detach()))
            return super().loss(cells)

    policy = ToyPolicy()
    blocks, begun = roll(policy)[:1], torch.empty(0)
    module = grpo(policy, surrogate=Watching(), updates_per_batch=2)
    for version in (0, 1):
        for update in (0, 1):
            module.training_step(batch(blocks, update=update, version=version), 0)
            proximal, present = seen[-1]
            begun = present if update == 0 else begun
            assert torch.equal(proximal, begun)
            assert torch.equal(proximal, present) == (update == 0)
            with torch.no_grad():
                for parameter in policy.adapter.trained_parameters().values():
                    parameter.add_(0.05)
    once = grpo(policy, surrogate=Watching())
    once.training_step(batch(blocks), 0)
    assert not once._batch_start.tensors, "a copy that nobody needs"


def test_cells_without_an_advantage_are_useful_to_a_kl_alone() -> None:
    rewards = {"r": torch.tensor([[0.1, 0.1, 0.1], [0.0, 0.5, 1.0]])}
    without, with_kl = grpo(ToyPolicy()), grpo(ToyPolicy(), kl_weight=0.5)
    assert without.useful_samples(rewards, {"r": 1.0}).tolist() == [
        [False] * 3,
        [True, False, True],
    ]
    assert with_kl.useful_samples(rewards, {"r": 1.0}).tolist() == [[True] * 3] * 2
    assert without.teaching_groups(rewards, {"r": 1.0}).tolist() == [False, True]
    assert not without.needs_means


def test_effective_samples_are_kishs_share_of_joint_ratios() -> None:
    """All cells count alike on policy. A ratio that outweighs n others leaves about 1/n."""
    policy = ToyPolicy()
    blocks = roll(policy, groups=1)
    module = grpo(policy)
    module.training_step(batch(blocks), 0)
    assert float(module.collect_metrics()["effective_samples"]) == pytest.approx(1.0, abs=1e-4)
    shift = torch.zeros_like(blocks[0].log_probs)
    shift[0, 0] = 3.0  # times 12 dimensions
    module.training_step(batch([replace(blocks[0], log_probs=blocks[0].log_probs - shift)]), 0)
    found = module.collect_metrics()
    assert float(found["effective_samples"]) == pytest.approx(1 / shift.numel(), rel=1e-3)
    assert "joint_ratio" not in found
    shift[0, :2] = torch.tensor([100.0, 39.0]) / 12  # one beyond e^40 counts as e^40
    module.training_step(batch([replace(blocks[0], log_probs=blocks[0].log_probs - shift)]), 0)
    e = math.exp(-1.0)
    wanted = (1 + e) ** 2 / (1 + e**2) / shift.numel()
    assert float(module.collect_metrics()["effective_samples"]) == pytest.approx(wanted, rel=1e-3)


def test_a_block_of_weight_zero_changes_nothing_even_if_it_holds_nan(moved: tuple) -> None:
    """A rank without cells still runs the forward passes (collectives), and contributes exactly
    0."""
    policy, blocks, rewards = moved
    module = grpo(policy, surrogate=Guard(), kl_weight=0.1)
    alone = gradient(module, [batch(blocks[:1], rewards, 40.0)])
    nan = {
        name: torch.full_like(getattr(blocks[1], name), float("nan"))
        for name in ("latents", "next_latents", "means")
    }
    dropped = replace(blocks[1], weight=0.0, **nan)
    calls = policy.calls
    rewards = torch.cat([rewards[:1], torch.full((1, 4), float("nan"))])
    both = gradient(module, [batch([blocks[0], dropped], rewards, 40.0)])
    assert policy.calls - calls == 4  # replay and reference, for both blocks
    assert torch.equal(both, alone)


def test_a_micro_batch_without_blocks_costs_no_forward_and_gives_no_gradient(moved: tuple) -> None:
    """What a replica gets that has fewer blocks of a fragment than another."""
    policy, _, rewards = moved
    module, calls = grpo(policy, kl_weight=0.1), policy.calls
    loss = module.training_step(batch([], rewards, 40.0), 0)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert policy.calls == calls
    assert all(parameter.grad is None for parameter in policy.adapter.trained_parameters().values())


def test_the_stored_log_prob_is_the_old_one(moved: tuple) -> None:
    """I5: new.detach() in its place would make every ratio 1 and hide staleness."""
    policy, blocks, rewards = moved
    module, calls = grpo(policy), policy.calls
    right = gradient(module, [batch(blocks, rewards)])
    assert policy.calls - calls == len(blocks)  # without a KL there is no base to compare with
    shifted = [replace(block, log_probs=block.log_probs + 0.5) for block in blocks]
    assert not torch.allclose(gradient(module, [batch(shifted, rewards)]), right, atol=1e-6)


def test_clip_fraction_after_one_step() -> None:
    """Check 22: after an optimizer step the ratio is not 1: clip_fraction > 0 for c = 1e-5 and 0
    for a large c."""
    found = {}
    for clip in (1e-5, 0.9):
        policy = ToyPolicy()
        blocks = roll(policy)
        module = grpo(policy, clip_range=clip, updates_per_batch=2)
        optimizer = module.configure_optimizers()
        for update in range(2):
            module._meters.collect_metrics()
            optimizer.zero_grad()
            module.training_step(batch(blocks, update=update), update).backward()
            optimizer.step()
        found[clip] = {
            name: float(value) for name, value in module._meters.collect_metrics().items()
        }
    assert found[1e-5]["clip_fraction"] > 0.5
    assert found[0.9]["clip_fraction"] == 0.0
    assert found[0.9]["ratio_max_dev"] > 1e-5
    assert "clip_fraction/stale_1" not in found[0.9]


def test_metrics_are_of_live_cells_and_told_apart_by_the_age_of_their_weights(moved: tuple) -> None:
    """A fresh block, a stale one of fewer rows, and one that only takes part in collectives."""
    policy, blocks, rewards = moved
    fresh, stale = replace(blocks[0], version=1), rows_of(blocks[1], 1, 4)
    dead = replace(blocks[1], weight=0.0, log_probs=blocks[1].log_probs + 5.0)
    module = grpo(policy, kl_weight=0.1, clip_range=[1e-4, 2e-3], ratio_bound=1.0)
    loss = module.training_step(batch([fresh, stale, dead], rewards, 50.0, version=1), 0)
    found = {name: float(value) for name, value in module.collect_metrics().items()}
    a = rewards.double() - rewards.double().mean(1, keepdim=True)
    a = (a / (rewards.double().std(1, unbiased=False, keepdim=True) + 1e-4)).float()
    ratios, cut, base_kl = [], [], []
    for block in (fresh, stale):
        with torch.no_grad():
            new = denoise.replay(policy, block, FlowSDE(0.7))
            with policy.adapter.reference():
                old = denoise.replay(policy, block, FlowSDE(0.7))
        ratio = (new.log_prob - block.log_probs).exp()
        rises = a[block.group, list(block.numbers)][:, None] > 0
        ratios.append(ratio)
        cut.append(torch.where(rises, ratio > 1 + 2e-3, ratio < 1 - 1e-4))
        base_kl.append(((new.mean - old.mean) ** 2).flatten(2).mean(2) / (2 * new.scale**2))
    whole, hit = torch.cat(ratios), torch.cat(cut).double()
    assert 0 < hit.mean() < 1
    joint = (12 * whole.log()).exp()
    wanted = {
        "loss": float(loss.detach()) * 50.0 / whole.numel(),
        "kl": float(torch.cat(base_kl).mean()),
        "clip_fraction": float(hit.mean()),
        "ratio_max_dev": float((whole - 1).abs().max()),
        "effective_samples": float(joint.mean() ** 2 / joint.square().mean()),
        "clip_fraction/first": float(cut[0].double().mean()),
    }
    for age, (ratio, over) in enumerate(zip(ratios, cut, strict=True)):
        wanted |= {
            f"clip_fraction/stale_{age}": float(over.double().mean()),
            f"ratio/stale_{age}": float(ratio.mean()),
            f"ratio_max_dev/stale_{age}": float((ratio - 1).abs().max()),
        }
    assert found == {name: pytest.approx(value, rel=1e-5) for name, value in wanted.items()}
    assert module.collect_metrics() == {}
    alone: Any = SimpleNamespace(device="cpu", all_gather=lambda mine: mine[None])
    module.first_ratio_max_dev = module._first_ratios.largest_deviation(alone)
    assert module.first_ratio_max_dev == pytest.approx(wanted["ratio_max_dev"], rel=1e-5)
    module.training_step(batch([fresh], rewards), 0)  # after the first update nothing is kept
    assert module._first_ratios.largest_deviation(alone) is None


@pytest.mark.parametrize("kind", ["gaussian", "h_free", "mean_square"])
def test_each_kl_is_its_own(kind: str, moved: tuple) -> None:
    """|difference of means|^2 over 2 S^2, over 2 std^2 (without sqrt(h)), and over nothing."""
    policy, blocks, rewards = moved
    module = grpo(policy, kl_weight=0.1, kl_kind=kind)
    module.training_step(batch(blocks[:1], rewards), 0)
    with torch.no_grad():
        new = denoise.replay(policy, blocks[0], FlowSDE(0.7))
        with policy.adapter.reference():
            old = denoise.replay(policy, blocks[0], FlowSDE(0.7))
    over = {"gaussian": 2 * new.scale**2, "h_free": 2 * new.std**2, "mean_square": 1.0}[kind]
    wanted = ((new.mean - old.mean) ** 2).flatten(2).mean(2) / over
    assert float(module.collect_metrics()["kl"]) == pytest.approx(float(wanted.mean()), rel=1e-5)


def two_updates(blocks: list[CellBlock], rewards: Tensor, step: int) -> list[TrainBatch]:
    """Two updates of two micro-batches of unequal size."""
    cells = 16.0
    return [
        batch([rows_of(blocks[0], 0, 3)], rewards, cells, 0, step),
        batch([rows_of(blocks[0], 3, 4)], rewards, cells, 0, step),
        batch([rows_of(blocks[1], 0, 2)], rewards, cells, 1, step),
        batch([rows_of(blocks[1], 2, 4)], rewards, cells, 1, step),
    ]


def test_trainer_sees_right_metrics_and_an_exact_first_ratio(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Metrics reach callbacks at the end of their own RL step, averaged over samples, not over
    micro-batches."""
    policy = ToyPolicy()
    module = grpo(policy, updates_per_batch=2, kl_weight=0.01, clip_range=0.3)
    with caplog.at_level(logging.INFO, logger="digenrl.algorithms"):
        trainer, steps = fit(module, policy, two_updates, epochs=3, accumulate=2)
    before, after = (r.message for r in caplog.records if r.message.startswith("max |ratio-1|"))
    assert before.endswith("must be at most 1e-05")
    assert "its 99.9% quantile" in after
    assert trainer.global_step == 6
    # rows 0..2 and row 3 have another geometry than the rollout's four rows: rounding, but within
    # the bound
    assert module.first_ratio_max_dev is not None
    assert module.first_ratio_max_dev <= 1e-5
    assert len(steps) == 3
    blocks = roll(ToyPolicy(), step=0)
    rewards = torch.stack([-(block.final - 1.0).square().flatten(1).mean(1) for block in blocks])
    assert steps[0]["reward"] == pytest.approx(float(rewards.mean()), rel=1e-5)
    assert steps[0]["reward/r"] == pytest.approx(float(rewards.mean()), rel=1e-5)
    assert steps[0]["reward_std"] == pytest.approx(float(rewards.std(unbiased=False)), rel=1e-3)
    assert steps[0]["zero_variance_groups"] == 0.0
    for name in ("loss", "kl", "clip_fraction", "ratio_max_dev", "grad_norm", "effective_samples"):
        assert name in steps[0]
    assert not [name for name in steps[0] if name.endswith(("_step", "_epoch"))]
    assert steps[0]["grad_norm_clipped"] == pytest.approx(min(steps[0]["grad_norm"], 1.0), rel=1e-6)
    assert steps[2]["kl"] > steps[0]["kl"] > 0


def test_first_ratio_above_the_bound_stops_the_run_before_any_update() -> None:
    policy = ToyPolicy()
    module = grpo(policy)
    before = [p.detach().clone() for p in policy.adapter.trained_parameters().values()]

    def wrong_sigmas(blocks: list[CellBlock], rewards: Tensor, step: int) -> list[TrainBatch]:
        return [
            batch(
                [replace(block, sigmas=static_grid(5, 3.01)) for block in blocks],
                rewards,
                version=step,
            )
        ]

    with pytest.raises(RuntimeError, match=r"before the first optimizer step is .* above 1e-05"):
        fit(module, policy, wrong_sigmas)
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, policy.adapter.trained_parameters().values(), strict=True)
    )


@pytest.mark.parametrize(
    ("dtype", "shift", "message"),
    [
        (
            torch.float32,
            3e-4,
            r"is 0\.0003, above 1e-05 \(99\.9% quantile 0\.0003, computed in float32\).*equal "
            r"weights",
        ),
        (torch.bfloat16, 3e-4, None),
        (
            torch.bfloat16,
            4e-3,
            r"above 0\.001 \(99\.9% quantile 0\.004\d*, computed in bfloat16\).*ratio_bound=0\.008",
        ),
    ],
)
def test_the_bound_is_that_of_the_dtype_that_forwards_compute_in(
    dtype: torch.dtype, shift: float, message: str | None
) -> None:
    """fp32 masters under a 16-bit forward: the weights' dtype says nothing about rounding."""
    policy = ToyPolicy()
    policy.dtype = dtype

    def shifted(blocks: list[CellBlock], rewards: Tensor, step: int) -> list[TrainBatch]:
        return [
            batch(
                [replace(b, log_probs=b.log_probs - shift) for b in blocks], rewards, version=step
            )
        ]

    module = grpo(policy)
    if message is None:
        fit(module, policy, shifted)
        assert module.first_ratio_max_dev == pytest.approx(shift, rel=0.01)
        return
    with pytest.raises(RuntimeError, match=message):
        fit(module, policy, shifted)


def test_a_trained_parameter_without_gradient_stops_the_run_before_any_update() -> None:
    policy = ToyPolicy()
    policy.transformer.register_parameter("unread", torch.nn.Parameter(torch.zeros(2)))
    before = [p.detach().clone() for p in policy.adapter.trained_parameters().values()]

    def one_cell(blocks: list[CellBlock], rewards: Tensor, step: int) -> list[TrainBatch]:
        return [batch([steps_of(rows_of(blocks[0], 0, 1), 0, 1)], rewards, version=step)]

    with pytest.raises(
        RuntimeError, match=r"1 of 5 trained parameters got no gradient .*first: unread"
    ):
        fit(grpo(policy), policy, one_cell)
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, policy.adapter.trained_parameters().values(), strict=True)
    )


def test_non_finite_gradients_are_skipped_exactly_and_three_in_a_row_stop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Bad input: the update is an exact no-op (no decay, no optimizer state), the third raises."""
    policy = ToyPolicy()
    module = grpo(policy, ema=Ema(0.9, 1))
    weights: list[list[Tensor]] = []

    def poisoned(blocks: list[CellBlock], rewards: Tensor, step: int) -> list[TrainBatch]:
        weights.append([p.detach().clone() for p in policy.adapter.trained_parameters().values()])
        if step in (0, 1, 3, 4, 5):
            rewards[0, 0] = float("inf")
        return [batch(blocks, rewards, version=step)]

    with pytest.raises(RuntimeError, match=r"3 updates in a row .*: reward/r\)") as stopped:
        fit(module, policy, poisoned, epochs=9)
    assert module.skipped_updates == 5
    told = [record.getMessage() for record in caplog.records if "is skipped" in record.message]
    assert [re.search(r"(\d) of 3 in a row", line)[1] for line in told] == [*"12123"]
    assert told[-1] in str(stopped.value)
    assert all(bool(torch.isfinite(value).all()) for value in weights[-1])
    same = [
        all(torch.equal(a, b) for a, b in zip(*pair, strict=True)) for pair in pairwise(weights)
    ]
    assert same == [True, True, False, True, True]
    assert module.ema is not None
    assert module.ema.steps == 1


@pytest.mark.parametrize("most", [None, 1e-3])
def test_an_update_clips_what_it_steps_with_and_reports_both(most: float | None) -> None:
    policy = ToyPolicy()
    module, blocks = grpo(policy, max_grad_norm=most), roll(policy)
    module.first_ratio_max_dev = 0.0  # there are no other ranks to ask
    optimizer = module.configure_optimizers()
    module.training_step(batch([], torch.zeros(2, 4), 1.0), 0).backward()
    module.configure_gradient_clipping(optimizer)  # this rank has no cells, and so no complaint
    assert all(not bool(p.grad.any()) for p in policy.adapter.trained_parameters().values())
    module.collect_metrics()
    optimizer.zero_grad()
    module.training_step(batch(blocks), 0).backward()
    before = [p.grad.clone() for p in policy.adapter.trained_parameters().values()]
    norm = float(torch.cat([g.flatten() for g in before]).norm())
    module.configure_gradient_clipping(optimizer)
    left = min(1.0, (most or 1.0) / norm)
    for own, parameter in zip(before, policy.adapter.trained_parameters().values(), strict=True):
        torch.testing.assert_close(parameter.grad, left * own, rtol=2e-3, atol=0)
    found = module.collect_metrics()
    assert float(found["update_skipped"]) == 0.0
    assert float(found["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    assert float(found["grad_norm_clipped"]) == pytest.approx(left * norm, rel=1e-5)
    # A later update may leave a parameter out.
    first = next(iter(policy.adapter.trained_parameters().values()))
    first.grad = None
    module.configure_gradient_clipping(optimizer)
    first.grad = torch.full_like(first, torch.nan)
    module.configure_gradient_clipping(optimizer)
    assert float(module.collect_metrics()["update_skipped"]) == 0.5


@pytest.mark.parametrize("ema", [None, Ema(0.5, 1)])
def test_the_average_begins_with_the_first_weights_and_is_what_evaluations_see(
    ema: Ema | None,
) -> None:
    policy = ToyPolicy()
    module, own = grpo(policy, ema=ema), policy.adapter.trained_parameters()
    first = {name: value.detach().clone() for name, value in own.items()}
    module.on_train_start()
    with torch.no_grad():
        for value in own.values():
            value.add_(1.0)
    now = {name: value.detach().clone() for name, value in own.items()}
    wanted = now if ema is None else first
    told = module.evaluated_parameters()
    with module.averaged():
        seen = {name: value.detach().clone() for name, value in own.items()}
    with module.rollout_weights():
        assert [*module.rollout_parameters()] == [*own]
        for name, value in own.items():
            assert torch.equal(seen[name], wanted[name])
            assert torch.equal(told[name], wanted[name])
            assert torch.equal(value, now[name])  # and rollouts


def test_checkpoint_holds_trained_parameters_only_and_resumes(tmp_path: Path) -> None:
    """The average and the first ratio survive. `strict_loading` is False, and weights_only=True
    loads the file."""

    def cut(blocks: list[CellBlock], rewards: Tensor, step: int) -> list[TrainBatch]:
        return [batch(blocks, rewards, version=step)]

    policy = ToyPolicy()
    module = grpo(policy, ema=Ema(0.9, 1))
    trainer, _ = fit(module, policy, cut, epochs=2)
    path = tmp_path / "run.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    assert set(saved["state_dict"]) == {
        f"policy.transformer.{name}" for name in policy.adapter.trained_parameters()
    }
    assert module.first_ratio_max_dev == 0.0
    fresh_policy = ToyPolicy()
    fresh = grpo(fresh_policy, ema=Ema(0.9, 1))
    fit(fresh, fresh_policy, cut, epochs=4, ckpt_path=str(path))
    straight_policy = ToyPolicy()
    straight = grpo(straight_policy, ema=Ema(0.9, 1))
    fit(straight, straight_policy, cut, epochs=4)
    assert fresh.first_ratio_max_dev == 0.0
    assert fresh.ema is not None
    assert straight.ema is not None
    assert fresh.ema.steps == straight.ema.steps == 4
    for name, value in straight_policy.adapter.trained_parameters().items():
        assert torch.equal(value, fresh_policy.adapter.trained_parameters()[name])
        assert torch.equal(straight.ema.copy.tensors[name], fresh.ema.copy.tensors[name])
    other = ToyPolicy()
    with pytest.raises(ValueError, match=r"algorithm\.ema"):
        fit(grpo(other), other, cut, epochs=4, ckpt_path=str(path))


def test_stale_cells_are_counted_apart() -> None:
    policy = ToyPolicy()
    blocks = roll(policy)
    module = grpo(policy)
    with torch.no_grad():
        policy.transformer[2].bias.add_(0.02)
    module.training_step(batch(blocks, version=1), 0)
    found = module._meters.collect_metrics()
    assert float(found["ratio_max_dev/stale_1"]) > 0
    assert "ratio_max_dev/stale_0" not in found


def test_bad_combinations_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="Guard needs a Gaussian log-prob, and FlowCPS"):
        grpo(ToyPolicy(), sde=FlowCPS(0.8), surrogate=Guard())
    with pytest.raises(ValueError, match="noise level 0"):
        grpo(ToyPolicy(), sde=FlowSDE(0.0))
    with pytest.raises(ValueError, match="kl_kind"):
        grpo(ToyPolicy(), kl_kind="reverse")
    with pytest.raises(ValueError, match="step_weight must be one of"):
        grpo(ToyPolicy(), step_weight="h")
    with pytest.raises(ValueError, match=r"step_weight=longcat is FlowSDE's.*FlowCPS"):
        grpo(ToyPolicy(), sde=FlowCPS(0.8), step_weight="longcat")
    for wrong in ([0.0, 0.1], [1.0, 0.1], [0.1, 0.0]):
        with pytest.raises(ValueError, match="clip_range"):
            grpo(ToyPolicy(), clip_range=wrong)
    assert grpo(ToyPolicy(), clip_range=[0.5, 3]).clip == (0.5, 3.0)
    with pytest.raises(ValueError, match="updates_per_batch"):
        grpo(ToyPolicy(), updates_per_batch=0)
    with pytest.raises(ValueError, match="max_grad_norm must be positive or null, got 0"):
        grpo(ToyPolicy(), max_grad_norm=0.0)
    policy = ToyPolicy()
    without = [replace(block, means=None) for block in roll(policy)]
    with pytest.raises(ValueError, match="rollout means"):
        grpo(policy, surrogate=Guard()).training_step(batch(without), 0)
    video = ToyPolicy(latent_shape=(16, 9, 30, 4))
    with caplog.at_level(logging.WARNING, logger="digenrl.algorithms.grpo"):
        grpo(video, clip_range=1e-3)
        grpo(ToyPolicy(), clip_range=9e-4)
        assert not caplog.records
        grpo(ToyPolicy(latent_shape=(4096, 16)), clip_range=0.1)
        grpo(ToyPolicy(), clip_range=8e-4)
    large, small = (record.getMessage() for record in caplog.records)
    assert "looks too large: log-probs here are means per dimension (D=65536)" in large
    assert "looks too small" in small


def test_dropout_stays_off_in_training() -> None:
    policy = ToyPolicy()
    policy.transformer.append(torch.nn.Dropout(0.5))
    module = grpo(policy).eval()
    assert not module.training
    assert module.train().training
    assert not policy.transformer[-1].training
