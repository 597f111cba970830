"""GAP: group-first queues, fixed versions, fragments that partition an update."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.schedule import (
    ScheduleSpec,
    next_fragment,
    resumed_queue,
    slices_of_group,
    update_fragments,
    update_of,
    version_queue,
)
from digenrl.schedule.order import stale_groups
from digenrl.schedule.timesteps import fragment_blocks


@st.composite
def specs(draw: st.DrawFn) -> ScheduleSpec:
    updates = draw(st.integers(1, 3))
    size = draw(st.integers(1, 3))
    split = draw(st.sampled_from(["groups", "samples"]))
    return ScheduleSpec(
        prompts=updates * draw(st.integers(1, 5)),
        group_size=size * draw(st.integers(2, 3)) * slices_of_group(split, updates),
        task_size=size,
        denoise_steps=5,
        trained_steps=draw(st.integers(1, 5)),
        updates_per_batch=updates,
        updates_split=split,
        gap=draw(st.integers(0, 4)),
        tsp_batch=draw(st.integers(1, 5)),
        tsp_shard=draw(st.booleans()),
        async_steps=draw(st.integers(0, 1)),
        stale_fraction=draw(st.floats(0, 1)),
    )


@settings(deadline=None)
@given(specs(), st.integers(0, 5))
def test_i7_i8_every_task_is_queued_once_under_its_version(spec: ScheduleSpec, last: int) -> None:
    queued = [task for version in range(last + 1) for task in version_queue(spec, version, last)]
    assert sorted((t.step, t.index) for t in queued) == [
        (s, i) for s in range(last + 1) for i in range(spec.tasks)
    ]
    for version in range(last + 1):
        tasks = version_queue(spec, version, last)
        assert all(task.version == version for task in tasks)
        assert [(t.step, t.index) for t in tasks] == sorted(
            (t.step, t.index) for t in tasks
        )  # group-first


@settings(deadline=None)
@given(specs(), st.integers(1, 5))
def test_a_resumed_run_makes_the_stale_head_again(spec: ScheduleSpec, step: int) -> None:
    tasks = resumed_queue(spec, step)
    assert {task.group for task in tasks} == set(range(stale_groups(spec, step)))
    assert tasks == tuple(task for task in version_queue(spec, step - 1, step) if task.step == step)


@settings(deadline=None)
@given(specs(), st.randoms(use_true_random=False))
def test_i4_fragments_partition_an_update_and_wait_for_their_groups(
    spec: ScheduleSpec, random
) -> None:  # type: ignore[no-untyped-def]
    arrival = list(range(spec.prompts))
    random.shuffle(arrival)
    for update in range(spec.updates_per_batch):
        parts = list(update_fragments(spec, update))
        assert [portion for part in parts for portion in part] == [
            p for p in range(spec.prompts * spec.slices) if update_of(spec, p) == update
        ]
        trained: list[tuple[int, ...]] = []
        for count in range(spec.prompts + 1):
            while (
                parts and (fragment := next_fragment(spec, parts, set(arrival[:count]))) is not None
            ):
                assert set(spec.groups_of(fragment)) <= set(
                    arrival[:count]
                )  # nothing incomplete is trained
                parts.remove(fragment)
                trained.append(fragment)
        assert not parts
        assert trained == sorted(trained)


def test_updates_that_share_samples_take_them_in_order_from_every_group() -> None:
    """DanceGRPO's and MixGRPO's accumulation: 12 samples, 4 updates of 3."""
    spec = ScheduleSpec(8, 12, 1, 5, 4, updates_per_batch=4, updates_split="samples", gap=3)
    taken = [
        {(group, part) for f in update_fragments(spec, update) for group, part in tasks_of(spec, f)}
        for update in range(4)
    ]
    assert taken == [
        {(g, part) for g in range(8) for part in range(3 * u, 3 * u + 3)} for u in range(4)
    ]
    assert spec.cells_per_update == 8 * 3 * 4
    for group, part in itertools.product(range(8), range(12)):
        portion = spec.portion_of(group, part)
        assert (spec.groups_of([portion]), update_of(spec, portion)) == ([group], part // 3)
    with pytest.raises(
        ValueError, match=r"updates_per_batch = 4 must divide the 6 tasks of a group"
    ):
        replace(spec, task_size=2)


def tasks_of(spec: ScheduleSpec, fragment: tuple[int, ...]) -> set[tuple[int, int]]:
    return {(block.group, block.part) for block in fragment_blocks(spec, fragment)}
