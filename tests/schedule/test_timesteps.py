"""TSP: placement is exact, follows shares, and gives every rank the same number of
micro-batches."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.schedule import (
    ScheduleSpec,
    micro_batches_per_update,
    place_fragment,
    update_fragments,
)
from digenrl.schedule.timesteps import apportion_units, cells_by_rank, without_useless_tasks

SHARES = st.lists(st.floats(0, 5), min_size=1, max_size=6).filter(lambda shares: sum(shares) > 0.01)


def spec(**changes: object) -> ScheduleSpec:
    base = {"prompts": 4, "group_size": 6, "task_size": 2, "denoise_steps": 8, "trained_steps": 7}
    return ScheduleSpec(**{**base, **changes})  # type: ignore[arg-type]


@settings(deadline=None)
@given(SHARES, st.integers(1, 7), st.booleans(), st.integers(0, 3))
def test_i2_every_cell_is_placed_once_whatever_the_shares(
    shares: list[float], k: int, shard: bool, gap: int
) -> None:
    schedule = spec(tsp_batch=k, tsp_shard=shard, gap=gap, shares=tuple(shares))
    groups = tuple(range(schedule.fragment_groups))
    placement = place_fragment(schedule, len(shares), groups)
    assert len({len(micro) for micro in placement}) == 1
    cells = Counter(
        (b.group, b.part, s) for rank in placement for micro in rank for b in micro for s in b.steps
    )
    assert set(cells.values()) == {1}
    assert len(cells) == len(groups) * schedule.tasks_per_group * schedule.trained_steps
    for rank, share in enumerate(shares):
        if share == 0:
            assert not any(placement[rank])  # it only joins collectives


@settings(deadline=None)
@given(st.integers(0, 100), SHARES)
def test_apportion_is_exact_and_within_one(units: int, shares: list[float]) -> None:
    counts = apportion_units(units, tuple(shares))
    assert sum(counts) == units
    assert all(
        abs(c - units * s / sum(shares)) < 1 + 1e-6 for c, s in zip(counts, shares, strict=True)
    )


@pytest.mark.parametrize(
    ("shares", "cells"), [((3.0, 1.0), (63, 21)), ((5.0, 0.0), (84, 0)), ((1.0, 1.0), (42, 42))]
)
def test_i3_shares_3_to_1_and_5_to_0(shares: tuple[float, ...], cells: tuple[int, ...]) -> None:
    placement = place_fragment(spec(tsp_shard=True, shares=shares), 2, (0, 1, 2, 3))
    placed = tuple(sum(len(block.steps) for micro in rank for block in micro) for rank in placement)
    assert placed == cells


@pytest.mark.parametrize("shard", [True, False])
def test_i2_a_context_group_has_one_place(shard: bool) -> None:
    placement = place_fragment(spec(tsp_shard=shard, context=2), 6, (0, 1, 2, 3))
    assert (
        placement[::2] == placement[1::2] == place_fragment(spec(tsp_shard=shard), 3, (0, 1, 2, 3))
    )
    with pytest.raises(ValueError, match=r"parallel\.context = 2 must divide the 3 trainers"):
        place_fragment(spec(context=2), 3, (0, 1, 2, 3))


def test_without_shard_a_task_stays_on_one_rank() -> None:
    placement = place_fragment(spec(), 3, (0, 1, 2, 3))
    owners = {
        (b.group, b.part): rank for rank in range(3) for micro in placement[rank] for b in micro
    }
    assert all(
        owners[b.group, b.part] == rank
        for rank in range(3)
        for micro in placement[rank]
        for b in micro
    )
    assert micro_batches_per_update(spec(), 3) == 4 * 7


@settings(deadline=None)
@given(
    SHARES,
    st.integers(1, 7),
    st.booleans(),
    st.sets(st.tuples(st.integers(0, 3), st.integers(0, 2))),
)
def test_what_is_left_without_useless_tasks_is_placed_once(
    shares: list[float], k: int, shard: bool, useless: set[tuple[int, int]]
) -> None:
    schedule = spec(tsp_batch=k, tsp_shard=shard, shares=tuple(shares))
    whole = place_fragment(schedule, len(shares), (0, 1, 2, 3))
    left = without_useless_tasks(whole, frozenset(useless))
    assert {len(own) for own in left} == {len(whole[0])}, "the number of collectives stays"
    kept = [
        [b for micro in own for b in micro if (b.group, b.part) not in useless] for own in whole
    ]
    assert [[b for micro in own for b in micro] for own in left] == kept


def test_sharded_ranks_run_a_third_of_the_forwards_for_a_third_of_the_samples() -> None:
    """24 samples of 9 steps over 8 ranks, of which 8 are trained: 9 forwards if nothing were lost,
    27 for all."""
    schedule = spec(group_size=24, task_size=1, trained_steps=9, tsp_shard=True, gap=1)
    whole = place_fragment(schedule, 8, (0,))
    for seed in range(20):
        useful = random.Random(seed).sample(range(24), 8)
        left = without_useless_tasks(
            whole, frozenset((0, part) for part in range(24) if part not in useful)
        )
        forwards = sum(any(own[i] for own in left) for i in range(len(left[0])))
        assert 9 <= forwards <= 12


@pytest.mark.parametrize("trainers", [2, 4])
def test_replicas_divide_whole_groups_when_a_group_is_one_task(trainers: int) -> None:
    """All steps of a task are in one forward, so no trainer can help another with a group. Each
    trainer has groups of its own, and trains no other cell."""
    schedule = spec(task_size=6, tsp_batch=7, gap=1)
    cells = [
        cells_by_rank(schedule, trainers, False, fragment)
        for fragment in update_fragments(schedule, 0)
    ]
    longest = max(sum(of_rank) for of_rank in zip(*cells, strict=True))
    alone = sum(
        cells_by_rank(schedule, 1, False, fragment)[0] for fragment in update_fragments(schedule, 0)
    )
    assert longest == alone / trainers


@pytest.mark.parametrize("trainers", [2, 3])
def test_the_odd_unit_goes_round_the_ranks(trainers: int) -> None:
    """Fragments of one group whose units do not divide: each rank has the larger part in turn."""
    schedule = spec(prompts=6, group_size=2 * trainers + 2, task_size=2, gap=1)
    larger = []
    for group in range(6):
        cells = [
            sum(len(block.steps) for micro in own for block in micro)
            for own in place_fragment(schedule, trainers, (group,))
        ]
        assert sorted(cells)[-2] < max(cells)
        larger.append(cells.index(max(cells)))
    assert Counter(larger) == dict.fromkeys(range(trainers), 6 // trainers)


def test_shares_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="3 entries for 2 trainers"):
        place_fragment(spec(shares=(1.0, 1.0, 1.0)), 2, (0,))
