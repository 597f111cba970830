"""TSP: placement is exact, follows shares, and gives every rank the same number of micro-batches."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.schedule import ScheduleSpec, micro_batches_per_update, place
from digenrl.schedule.timesteps import apportion

SHARES = st.lists(st.floats(0, 5), min_size=1, max_size=6).filter(lambda shares: sum(shares) > 0.01)


def spec(**changes: object) -> ScheduleSpec:
    base = {"prompts": 4, "group_size": 6, "task_size": 2, "denoise_steps": 8, "trained_steps": 7}
    return ScheduleSpec(**{**base, **changes})  # type: ignore[arg-type]


@settings(deadline=None)
@given(SHARES, st.integers(1, 7), st.booleans(), st.integers(0, 3))
def test_i2_every_cell_is_placed_once_whatever_the_shares(shares: list[float], k: int, shard: bool, gap: int) -> None:
    schedule = spec(tsp_batch=k, tsp_shard=shard, gap=gap, shares=tuple(shares))
    groups = tuple(range(schedule.fragment_groups))
    placement = place(schedule, len(shares), groups)
    assert len({len(micro) for micro in placement}) == 1
    cells = Counter((b.group, b.part, s) for rank in placement for micro in rank for b in micro for s in b.steps)
    assert set(cells.values()) == {1}
    assert len(cells) == len(groups) * schedule.tasks_per_group * schedule.trained_steps
    for rank, share in enumerate(shares):
        if share == 0:
            assert not any(placement[rank])  # it only joins collectives


@settings(deadline=None)
@given(st.integers(0, 100), SHARES)
def test_apportion_is_exact_and_within_one(units: int, shares: list[float]) -> None:
    counts = apportion(units, tuple(shares))
    assert sum(counts) == units
    assert all(abs(c - units * s / sum(shares)) < 1 + 1e-6 for c, s in zip(counts, shares, strict=True))


@pytest.mark.parametrize(("shares", "cells"), [((3.0, 1.0), (63, 21)), ((5.0, 0.0), (84, 0)), ((1.0, 1.0), (42, 42))])
def test_i3_shares_3_to_1_and_5_to_0(shares: tuple[float, ...], cells: tuple[int, ...]) -> None:
    placement = place(spec(tsp_shard=True, shares=shares), 2, (0, 1, 2, 3))
    placed = tuple(sum(len(block.steps) for micro in rank for block in micro) for rank in placement)
    assert placed == cells


def test_without_shard_a_task_stays_on_one_rank() -> None:
    placement = place(spec(), 3, (0, 1, 2, 3))
    owners = {(b.group, b.part): rank for rank in range(3) for micro in placement[rank] for b in micro}
    assert all(owners[b.group, b.part] == rank for rank in range(3) for micro in placement[rank] for b in micro)
    assert micro_batches_per_update(spec(), 3) == 4 * 7


def test_shares_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="3 entries for 2 trainers"):
        place(spec(shares=(1.0, 1.0, 1.0)), 2, (0,))
