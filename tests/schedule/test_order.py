"""GAP: group-first queues, fixed versions, fragments that partition an update."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.schedule import ScheduleSpec, fragments, next_fragment, queue, resumed_queue, stale_groups, update_of


@st.composite
def specs(draw: st.DrawFn) -> ScheduleSpec:
    updates = draw(st.integers(1, 3))
    size = draw(st.integers(1, 3))
    return ScheduleSpec(
        prompts=updates * draw(st.integers(1, 5)),
        group_size=size * draw(st.integers(2, 3)),
        task_size=size,
        denoise_steps=5,
        trained_steps=draw(st.integers(1, 5)),
        updates_per_batch=updates,
        gap=draw(st.integers(0, 4)),
        order=draw(st.sampled_from(["canonical", "arrival"])),
        tsp_batch=draw(st.integers(1, 5)),
        tsp_shard=draw(st.booleans()),
        async_steps=draw(st.integers(0, 1)),
        stale_fraction=draw(st.floats(0, 1)),
    )


@settings(deadline=None)
@given(specs(), st.integers(0, 5))
def test_i7_i8_every_task_is_queued_once_under_its_version(spec: ScheduleSpec, last: int) -> None:
    queued = [task for version in range(last + 1) for task in queue(spec, version, last)]
    assert sorted((t.step, t.index) for t in queued) == [(s, i) for s in range(last + 1) for i in range(spec.tasks)]
    for version in range(last + 1):
        tasks = queue(spec, version, last)
        assert all(task.version == version for task in tasks)
        assert [(t.step, t.index) for t in tasks] == sorted((t.step, t.index) for t in tasks)  # group-first


@settings(deadline=None)
@given(specs(), st.integers(1, 5))
def test_a_resumed_run_makes_the_stale_head_again(spec: ScheduleSpec, step: int) -> None:
    tasks = resumed_queue(spec, step)
    assert {task.group for task in tasks} == set(range(stale_groups(spec, step)))
    assert tasks == tuple(task for task in queue(spec, step - 1, step) if task.step == step)


@settings(deadline=None)
@given(specs(), st.randoms(use_true_random=False))
def test_i4_fragments_partition_an_update_and_wait_for_their_groups(spec: ScheduleSpec, random) -> None:  # type: ignore[no-untyped-def]
    arrival = list(range(spec.prompts))
    random.shuffle(arrival)
    for update in range(spec.updates_per_batch):
        parts = list(fragments(spec, update))
        assert [group for part in parts for group in part] == [
            g for g in range(spec.prompts) if update_of(spec, g) == update
        ]
        trained: list[tuple[int, ...]] = []
        for count in range(spec.prompts + 1):
            while parts and (fragment := next_fragment(spec, parts, arrival[:count])) is not None:
                assert set(fragment) <= set(arrival[:count])  # nothing incomplete is trained
                parts.remove(fragment)
                trained.append(fragment)
        assert not parts
        if spec.order == "canonical":
            assert trained == sorted(trained)
