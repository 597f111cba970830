"""Advantages: docs/algorithms.md section 2 and check 15."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor

from digenrl.algorithms.advantages import Advantage, reward_statistics
from digenrl.config.relations import needs_whole_batch

NAN = float("nan")


def rewards(groups: int = 5, samples: int = 6, seed: int = 0) -> Tensor:
    return torch.rand(groups, samples, generator=torch.Generator().manual_seed(seed))


def values(advantage: Advantage, table: Tensor) -> Tensor:
    return advantage({"r": table}, {"r": 1.0}).values


VARIANTS = [
    Advantage(),
    Advantage(std="batch"),
    Advantage(std="max_group"),
    Advantage(std="none"),
    Advantage(baseline="leave_one_out"),
    Advantage(combine="per_reward"),
    Advantage(combine="per_reward", renormalise=True),
    Advantage(unbiased=True, eps=1e-8),
]


@pytest.mark.parametrize("advantage", VARIANTS)
def test_groups_are_centred_and_ordered(advantage: Advantage) -> None:
    """Check 15: mean 0 within every group, and a larger reward never has a smaller advantage."""
    table = rewards()
    got = values(advantage, table)
    torch.testing.assert_close(got.mean(1), torch.zeros(5), atol=1e-6, rtol=0)
    order = table.argsort(1)
    assert bool((got.gather(1, order).diff(dim=1) >= 0).all())


def check_equal_rewards(advantages: Callable[[Tensor], Tensor], exactly: bool) -> None:
    table = torch.cat([torch.full((1, 8), 0.1), torch.full((1, 8), 1 / 3), rewards(1, 8)])
    got = advantages(table)[:2]
    torch.testing.assert_close(got, torch.zeros(2, 8), atol=0 if exactly else 1e-6, rtol=0)


@pytest.mark.parametrize("advantage", VARIANTS)
def test_equal_rewards_give_exactly_zero(advantage: Advantage) -> None:
    """Check 15: the mean of eight fp32 0.1 is not 0.1; the advantage is 0 all the same, and the
    group is counted."""
    check_equal_rewards(lambda table: values(advantage, table), exactly=not advantage.renormalise)
    table = torch.cat([torch.full((1, 3), 0.1), rewards(1, 3)])
    assert advantage({"r": table}, {"r": 1.0}).zero_variance.tolist() == [True, False]


def test_check_15_can_fail() -> None:
    """The usual formula with DanceGRPO's 1e-8 turns the rounding of a mean into an advantage (trap
    T15)."""

    def usual(table: Tensor) -> Tensor:
        return (table - table.mean(1, keepdim=True)) / (table.std(1, keepdim=True) + 1e-8)

    with pytest.raises(AssertionError):
        check_equal_rewards(usual, exactly=True)


@pytest.mark.parametrize("advantage", VARIANTS)
def test_singleton_groups_are_zero_without_nan(advantage: Advantage) -> None:
    got = values(advantage, torch.tensor([[0.3], [0.9]]))
    torch.testing.assert_close(got, torch.zeros(2, 1), atol=1e-6, rtol=0)


def check_std_choice(group: Callable[[Tensor], Tensor], samples: int, unbiased: bool) -> None:
    table = rewards(3, samples)
    expected = (table - table.mean(1, keepdim=True)) / (
        table.std(1, keepdim=True, unbiased=unbiased) + 1e-4
    )
    torch.testing.assert_close(group(table), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("samples", [4, 24])
def test_population_or_unbiased_deviation_is_a_choice(samples: int) -> None:
    """Check 15: they differ by sqrt(G/(G-1)): 15% at G = 4, 2.1% at G = 24."""
    population, unbiased = Advantage(), Advantage(unbiased=True)
    check_std_choice(lambda t: values(population, t), samples, False)
    check_std_choice(lambda t: values(unbiased, t), samples, True)
    with pytest.raises(AssertionError):
        check_std_choice(lambda t: values(unbiased, t), samples, False)
    factor = float(
        (values(population, rewards(1, samples)) / values(unbiased, rewards(1, samples))).mean()
    )
    assert factor == pytest.approx((samples / (samples - 1)) ** 0.5, rel=1e-3)


def test_batch_std_is_invariant_to_permutation() -> None:
    """Check 15: one table of all rewards, so shards cannot matter; the group std would differ
    between groups."""
    advantage, table = Advantage(std="batch"), rewards()
    order = torch.randperm(5, generator=torch.Generator().manual_seed(1))
    assert torch.equal(values(advantage, table[order]), values(advantage, table)[order])
    expected = (table - table.mean(1, keepdim=True)) / (table.std(unbiased=False) + 1e-4)
    torch.testing.assert_close(values(advantage, table), expected, atol=1e-5, rtol=0)
    shard = values(advantage, table[:2])  # sensitivity: a shard's own std is another number
    assert not torch.allclose(shard, values(advantage, table)[:2], atol=1e-3)


@pytest.mark.parametrize("advantage", VARIANTS)
def test_group_advantages_do_not_change_when_other_groups_complete(advantage: Advantage) -> None:
    """I3 and GAP: a group's advantage is known as soon as the group is, unless `needs_whole_batch`
    says otherwise."""
    table = rewards()
    partial = table.clone()
    partial[3:] = NAN
    whole, early = values(advantage, table), values(advantage, partial)
    assert torch.equal(whole[:3], early[:3]) != needs_whole_batch(asdict(advantage))
    assert torch.equal(early[3:], torch.zeros(2, 6))


def test_max_group_std_and_leave_one_out() -> None:
    table = rewards()
    centred = table - table.mean(1, keepdim=True)
    largest = values(Advantage(std="max_group"), table)
    torch.testing.assert_close(
        largest, centred / (table.std(1, unbiased=False).max() + 1e-4), atol=1e-5, rtol=0
    )
    others = (table.sum(1, keepdim=True) - table) / 5
    rloo = values(Advantage(std="none", baseline="leave_one_out"), table)
    torch.testing.assert_close(rloo, table - others, atol=1e-6, rtol=0)


def test_missing_rewards_take_no_part() -> None:
    table = rewards(1, 6)
    table[0, 2] = NAN
    present = [0, 1, 3, 4, 5]
    for advantage in VARIANTS:
        got = values(advantage, table)
        assert float(got[0, 2]) == 0.0
        torch.testing.assert_close(
            got[:, present], values(advantage, table[:, present]), atol=1e-6, rtol=0
        )


def test_weighted_sum_and_per_reward_normalisation_differ() -> None:
    """Section 2: a sum of raw rewards lets the widest reward rule; per-reward normalisation does
    not."""
    wide, narrow = 100 * rewards(seed=1), 0.01 * rewards(seed=2)
    table, weights = {"wide": wide, "narrow": narrow}, {"wide": 1.0, "narrow": 1.0}
    summed = Advantage()(table, weights).values
    torch.testing.assert_close(summed, values(Advantage(), wide), atol=2e-2, rtol=0)
    each = replace(Advantage(combine="per_reward"), clip=None)(table, weights).values
    expected = values(Advantage(), wide) + values(Advantage(), narrow)
    torch.testing.assert_close(each, expected, atol=1e-5, rtol=0)
    gdpo = replace(Advantage(combine="per_reward", renormalise=True), clip=None)(
        table, weights
    ).values
    torch.testing.assert_close(
        gdpo, expected / (expected.std(unbiased=False) + 1e-4), atol=1e-4, rtol=0
    )


def test_evaluation_rewards_are_not_optimised() -> None:
    table = {"r": rewards(), "judge": rewards(seed=3)}
    assert torch.equal(Advantage()(table, {"r": 1.0}).values, values(Advantage(), table["r"]))


def test_clip_bounds_and_can_be_off() -> None:
    table = torch.zeros(1, 64)
    table[0, 0] = 1.0
    assert float(values(Advantage(), table).max()) == 5.0
    assert float(values(Advantage(clip=None), table).max()) > 7.0


def test_best_and_worst_selection() -> None:
    """DanceGRPO: advantages on all samples first, then the k best and k worst; the group's weight
    stays."""
    table = rewards(3, 8)
    everything = values(Advantage(clip=None), table)
    got = values(Advantage(clip=None, best_and_worst=2), table)
    ranks = table.argsort(1).argsort(1)
    keep = (ranks < 2) | (ranks >= 6)
    assert torch.equal(got != 0, keep)
    torch.testing.assert_close(
        got, torch.where(keep, everything * 8 / 4, torch.zeros_like(everything))
    )


def test_best_and_worst_are_chosen_among_what_is_there() -> None:
    """A missing sample is neither best nor worst, and the weight follows the number present."""
    table = torch.tensor([[0.1, 0.9, NAN, 0.5, 0.3], [NAN, NAN, 0.2, 0.4, NAN]])
    everything = values(Advantage(clip=None), table)
    got = values(Advantage(clip=None, best_and_worst=1), table)
    kept = torch.tensor([[2.0, 2.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0, 0.0]])
    torch.testing.assert_close(got, kept * everything)
    assert bool((got[kept > 0] != 0).all())


def check_clip_before_scaling(advantage: Callable[[Tensor], Tensor]) -> None:
    """Gaussian rewards, 4 + 4 of 24: no advantage of a group exceeds sqrt(23) < 5, so none is
    cut."""
    table = torch.randn(200, 24, generator=torch.Generator().manual_seed(0))
    everything = values(Advantage(clip=None), table)
    ranks = table.argsort(1).argsort(1)
    kept = torch.where((ranks < 4) | (ranks >= 20), 3 * everything, torch.zeros_like(everything))
    torch.testing.assert_close(advantage(table), kept, atol=1e-5, rtol=0)


def test_advantages_are_clipped_before_the_kept_ones_are_scaled() -> None:
    """DanceGRPO clamps what it has normalised; scaling comes with the mean over the kept
    samples."""
    selection = Advantage(best_and_worst=4)
    check_clip_before_scaling(lambda table: values(selection, table))
    with pytest.raises(AssertionError):
        check_clip_before_scaling(lambda table: values(selection, table).clamp(-5, 5))
    lonely = torch.zeros(1, 64)
    lonely[0, 0] = 1.0
    result = selection({"r": lonely}, {"r": 1.0})
    assert float(result.values.max()) == 5.0 * 64 / 8
    assert int(result.saturated.sum()) == 1
    found = reward_statistics(result, {"r": lonely})
    assert float(found["advantage_saturation"]) == pytest.approx(1 / 64)
    assert float(found["zero_variance_share"]) == 0.0


@pytest.mark.parametrize("renormalise", [False, True])
def test_a_sample_that_lacks_one_reward_leaves_every_statistic(renormalise: bool) -> None:
    """Per-reward normalisation: as if the sample had not been drawn."""
    advantage, weights = (
        Advantage(combine="per_reward", renormalise=renormalise),
        {"a": 1.0, "b": 0.5},
    )
    table = {"a": rewards(3, 6, seed=1), "b": rewards(3, 6, seed=2)}
    table["b"][:, 2] = NAN
    table["a"][:, 2] = 100.0
    got = advantage(table, weights).values
    others = [0, 1, 3, 4, 5]
    drawn = advantage({name: values[:, others] for name, values in table.items()}, weights).values
    torch.testing.assert_close(got[:, others], drawn, atol=1e-6, rtol=0)
    assert torch.equal(got[:, 2], torch.zeros(3))


def test_bad_options_are_named() -> None:
    with pytest.raises(ValueError, match="group, batch, max_group, none"):
        Advantage(std="global")
    with pytest.raises(ValueError, match="per_reward"):
        Advantage(renormalise=True)
    with pytest.raises(ValueError, match=r"missing: \['r'\]"):
        Advantage()({"other": rewards()}, {"r": 1.0})
