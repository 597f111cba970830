"""Which groups are trained: a function of the groups alone, whatever order they complete in."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from digenrl.schedule import ScheduleSpec
from digenrl.schedule.selection import (
    MISSING_REWARD,
    SURPLUS,
    ZERO_VARIANCE,
    decided_groups,
    left_out,
    update_groups,
)

FAULTS = (None, None, ZERO_VARIANCE, MISSING_REWARD)


@given(
    st.lists(st.sampled_from(FAULTS), min_size=6, max_size=6),
    st.permutations(range(6)),
    st.sampled_from([1, 2]),
    st.sampled_from(["groups", "samples"]),
)
def test_the_first_groups_that_teach_take_the_places_in_every_order_of_arrival(
    faults: list[str | None], order: list[int], updates: int, split: Literal["groups", "samples"]
) -> None:
    """What is decided stays so when more groups arrive, and all is decided when all are there."""
    spec = ScheduleSpec(6, 4, 2, 4, 3, updates_per_batch=updates, updates_split=split, oversample=2)
    fates: dict[int, str | None] = {}
    for count in range(1, 7):
        here = {group: faults[group] for group in order[:count]}
        for group in decided_groups(spec, here):
            assert fates.setdefault(group, left_out(spec, here, group)) == left_out(
                spec, here, group
            )
    for groups in (update_groups(spec, update) for update in range(updates)):
        teaching = [group for group in groups if faults[group] is None]
        assert [group for group in groups if fates[group] is None] == teaching[: spec.places]
        full = teaching[spec.places - 1] if len(teaching) >= spec.places else groups.stop
        assert all((fates[group] == SURPLUS) == (group > full) for group in groups)


def test_an_update_has_groups_of_its_own_unless_updates_share_all() -> None:
    spec = ScheduleSpec(6, 4, 2, 4, 3, updates_per_batch=2)
    assert [update_groups(spec, update) for update in (0, 1)] == [range(3), range(3, 6)]
    every = ScheduleSpec(6, 4, 2, 4, 3, updates_per_batch=2, updates_split="samples")
    assert [update_groups(every, update) for update in (0, 1)] == [range(6), range(6)]


def test_groups_that_cannot_lack_a_place_do_not_wait() -> None:
    spec = ScheduleSpec(5, 4, 2, 4, 3, oversample=2)
    assert decided_groups(spec, dict.fromkeys([2, 4])) == [2]
    assert decided_groups(spec, dict.fromkeys([0, 1, 2, 4])) == [0, 1, 2]
    everything = ScheduleSpec(5, 4, 2, 4, 3)
    for groups in itertools.permutations(range(5), 3):
        assert decided_groups(everything, dict.fromkeys(groups)) == list(groups)


def test_updates_take_equal_parts() -> None:
    with pytest.raises(
        ValueError,
        match=r"updates_per_batch = 2 .* data.prompts_per_batch = 4 and data.oversample = 1",
    ):
        ScheduleSpec(5, 4, 2, 4, 3, updates_per_batch=2, oversample=1)
