"""Shares follow measured speed, come to rest, and never starve a rank; placement stays complete and
equal in number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from digenrl.schedule import (
    ScheduleSpec,
    micro_batches_per_update,
    place_fragment,
    update_fragments,
)
from digenrl.schedule.speeds import adjusted_shares, relative_shares
from digenrl.schedule.timesteps import fragment_blocks

SECONDS = st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=9)


def slowest(shares: tuple[float, ...], seconds: list[float]) -> float:
    return max(share * cost for share, cost in zip(shares, seconds, strict=True)) / sum(shares)


def test_shares_are_hundredths_of_the_fastest() -> None:
    assert relative_shares([989.0, 165.0]) == (1.0, 0.17)
    assert relative_shares([1e9, 1.0]) == (1.0, 0.01), (
        "a rank without cells could never be measured again"
    )
    with pytest.raises(ValueError, match=r"\[1\.0, 0\.0\]: every one must be above 0"):
        relative_shares([1.0, 0.0])


def test_small_changes_are_ignored() -> None:
    assert adjusted_shares((1.0, 1.0), [1.0, 3.0]) == (1.0, 0.33)
    assert adjusted_shares((1.0, 0.33), [1.05, 3.0]) == (1.0, 0.33)
    assert adjusted_shares((1.0, 0.33), [1.0, 1.0]) == (1.0, 1.0)


@given(SECONDS, st.data())
def test_new_shares_are_never_slower_and_come_to_rest(
    seconds: list[float], data: st.DataObject
) -> None:
    current = tuple(
        data.draw(st.lists(st.floats(0.01, 1.0), min_size=len(seconds), max_size=len(seconds)))
    )
    first = adjusted_shares(current, seconds)
    assert slowest(first, seconds) <= slowest(current, seconds)
    assert adjusted_shares(first, seconds) == first
    assert min(first) >= 0.01


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(0, 3),
    st.booleans(),
)
def test_I2_I3_every_block_is_placed_once_in_the_same_number_of_micro_batches(
    hundredths: list[int], batch: int, gap: int, shard: bool
) -> None:
    """The number must not change with the shares: Lightning counts on it for the whole run."""
    facts = {"prompts": 4, "group_size": 4, "task_size": 2, "denoise_steps": 5, "trained_steps": 4}
    trainers = len(hundredths)
    shares = tuple(value / 100 for value in hundredths)
    spec = ScheduleSpec(
        **facts, gap=gap, tsp_batch=batch, tsp_shard=shard, shares=shares, measured_shares=True
    )
    for fragment in update_fragments(spec, 0):
        placement = place_fragment(spec, trainers, fragment)
        placed = [block for rank in placement for micro in rank for block in micro]
        assert sorted(placed, key=repr) == sorted(fragment_blocks(spec, fragment), key=repr)
        assert len({len(rank) for rank in placement}) == 1
    first = ScheduleSpec(
        **facts,
        gap=gap,
        tsp_batch=batch,
        tsp_shard=shard,
        shares=(1.0,) * trainers,
        measured_shares=True,
    )
    assert micro_batches_per_update(spec, trainers) == micro_batches_per_update(first, trainers)
