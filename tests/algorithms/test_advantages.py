"""Advantages: docs/algorithms.md section 2 and check 15."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from operator import itemgetter
from random import Random

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
    Advantage(eps=0.0),
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


def test_evaluation_rewards_are_not_optimised() -> None:
    table = {"r": rewards(), "judge": rewards(seed=3)}
    assert torch.equal(Advantage()(table, {"r": 1.0}).values, values(Advantage(), table["r"]))


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
    empty = {"r": torch.full((2, 3), NAN)}
    assert reward_statistics(selection(empty, {"r": 1.0}), empty) == {}


RULES = [
    Advantage(std, baseline, combine, renormalise, unbiased, 0.01, clip, best)
    for std, baseline, (combine, renormalise), unbiased, clip, best in itertools.product(
        ("group", "batch", "max_group", "none"),
        ("mean", "leave_one_out"),
        (("sum", False), ("per_reward", False), ("per_reward", True)),
        (False, True),
        (None, 1.0),
        (None, 1, 2),
    )
][::5]
WEIGHTS = {"b": 0.5, "a": 1.0}
Group = dict[int, dict[str, float]]
"""Sample -> its rewards; without samples that lack one."""
GROUPS: list[Group] = [
    *(
        {i: {"a": random(), "b": 3 * random()} for i in range(5)}
        for random in [Random(3).random] * 2
    ),
    {i: {"a": a, "b": 0.0} for i, a in enumerate((1.0, 1.0, -1.0, -1.0, 0.0))},  # 1 is not cut
    {i: {"a": 0.1, "b": 0.7} for i in (0, 2, 3)},  # alike
    {i: {"a": float(i), "b": 2.0 - 2 * i} for i in range(5)},  # alike in the sum alone
    {0: {"a": 0.9, "b": 0.2}, 3: {"a": 0.1, "b": 0.3}, 4: {"a": 0.4, "b": 0.6}},
    {1: {"a": 0.3, "b": 0.2}, 4: {"a": 0.5, "b": 0.1}},
    {2: {"a": 0.4, "b": 0.9}},
    {},
]


def reference(rule: Advantage, groups: list[Group]) -> list[dict[int, float]]:
    """Return group -> sample -> advantage before `clip` and `best_and_worst`, one sample at a time."""

    def deviation(found: Sequence[float]) -> float:
        middle = sum(found) / max(1, len(found))
        squares = sum((x - middle) ** 2 for x in found)
        return math.sqrt(squares / max(1, len(found) - rule.unbiased))

    def normalised(reward: Callable[[dict[str, float]], float]) -> list[dict[int, float]]:
        tables = [{i: reward(scores) for i, scores in group.items()} for group in groups]
        spreads = [deviation([*table.values()]) for table in tables]
        batch = deviation([x for table in tables for x in table.values()])
        found = []
        for table, own in zip(tables, spreads, strict=True):
            spread = {"group": own, "batch": batch, "max_group": max(spreads)}.get(rule.std)
            centred = dict.fromkeys(table, 0.0)
            for i in table if len({*table.values()}) > 1 else ():
                left_out = (i,) if rule.baseline == "leave_one_out" else ()
                others = [x for j, x in table.items() if j not in left_out]
                centred[i] = table[i] - sum(others) / len(others)
            found.append(
                {
                    i: x / (spread + rule.eps if spread is not None else 1.0)
                    for i, x in centred.items()
                }
            )
        return found

    if rule.combine == "sum":
        return normalised(lambda scores: sum(w * scores[name] for name, w in WEIGHTS.items()))
    parts = {name: normalised(itemgetter(name)) for name in WEIGHTS}
    found = [
        {i: sum(w * parts[name][p][i] for name, w in WEIGHTS.items()) for i in group}
        for p, group in enumerate(groups)
    ]
    if rule.renormalise:
        everyone = [x for group in found for x in group.values()]
        middle, spread = sum(everyone) / len(everyone), deviation(everyone) + rule.eps
        found = [{i: (x - middle) / spread for i, x in group.items()} for group in found]
    return found


@pytest.mark.parametrize("whole", [False, True])
def test_all_options_together_are_those_of_a_reference(whole: bool) -> None:
    """Every option, with samples that lack a reward or both, and groups that are alike, single or
    empty."""
    groups = [group for group in GROUPS if len(group) == 5 or not whole]
    tables = {name: torch.full((len(groups), 5), NAN) for name in WEIGHTS}
    for p, group in enumerate(groups):
        tables["a"][p] = NAN if len(group) < 2 else 100.0  # of samples that lack the other
        for i, scores in group.items():
            for name, score in scores.items():
                tables[name][p, i] = score
    scored = [
        [sum(w * float(tables[n][p, i]) for n, w in WEIGHTS.items()) for i in g]
        for p, g in enumerate(groups)
    ]
    alike = [len({round(x, 6) for x in row}) == 1 for row in scored]
    for rule in RULES:
        made = rule(tables, WEIGHTS)
        values, cut = torch.zeros(len(groups), 5), torch.zeros(len(groups), 5, dtype=torch.bool)
        for p, group in enumerate(reference(rule, groups)):
            order = sorted(group, key=lambda i: -group[i])
            k = rule.best_and_worst or len(order)
            kept = {*order[:k], *order[-k:]} if order else set()
            bound = rule.clip or math.inf
            for i, value in group.items():
                cut[p, i] = abs(value) > bound + 1e-9
                if i in kept:
                    values[p, i] = len(order) / len(kept) * max(-bound, min(bound, value))
        assert torch.allclose(made.values, values, atol=1e-6, rtol=1e-6), rule
        assert torch.equal(made.saturated, cut), rule
        assert made.zero_variance.tolist() == alike, rule
        if whole:
            told = [True, True, True, rule.combine == "per_reward"]  # the last is alike in the sum
            assert rule.teaching_groups(tables, WEIGHTS).tolist() == told


def test_bad_options_are_named() -> None:
    with pytest.raises(ValueError, match="group, batch, max_group, none"):
        Advantage(std="global")
    with pytest.raises(ValueError, match="per_reward"):
        Advantage(renormalise=True)
    with pytest.raises(ValueError, match=r"missing: \['r'\]"):
        Advantage()({"other": rewards()}, {"r": 1.0})
    assert Advantage(eps=0.0, clip=0.5, best_and_worst=1).eps == 0.0
    for wrong in ({"eps": -0.5}, {"clip": 0.0}, {"best_and_worst": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Advantage(**wrong)
