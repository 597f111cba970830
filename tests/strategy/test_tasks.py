"""Which tasks a rank may claim, and when it has none left: on a real store, without ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from digenrl.cluster.world import World
from digenrl.record.span_log import SpanLog
from digenrl.schedule import ScheduleSpec, queue
from digenrl.schedule.policy import SchedulePolicy
from digenrl.schedule.ranks import Roles
from digenrl.strategy.tasks import TaskRunner
from tests.cluster.test_claims import Store

SPEC = ScheduleSpec(prompts=3, group_size=2, task_size=1, denoise_steps=3, trained_steps=2)


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.close()


def runners(store: Store, **roles: bool) -> list[TaskRunner]:
    """Two colocated ranks."""
    unused: Any = None

    def plan(version: int) -> tuple[Any, ...]:
        return queue(SPEC, version, 1)

    return [
        TaskRunner(
            SPEC,
            World(rank, 2, 0),
            SchedulePolicy(SPEC, Roles(2, 0, **roles), plan, None),
            plan,
            unused,
            unused,
            unused,
            control,
            unused,
            SpanLog(None, rank, "trainer", 0.0),
        )
        for rank, control in enumerate(store.controls(2)[1])
    ]


@pytest.mark.parametrize("lockstep", [False, True], ids=["replicas", "sharded"])
def test_divided_tasks_are_claimed_in_halves_and_sharded_ranks_end_together(
    store: Store, lockstep: bool
) -> None:
    first, second = runners(store, lockstep=lockstep, split=True)
    total = len(queue(SPEC, 0, 1))
    own = [first.claim(0) for _ in range(total // 2)]
    assert [task.index for task in own if task] == list(range(total // 2))
    assert first.claim(0) is None
    assert (first.left(0), second.left(0)) == (total // 2 if lockstep else 0, total // 2)
    assert second.claim(0).index == total // 2
    assert (first.left(0), second.left(0)) == (total // 2 - 1 if lockstep else 0, total // 2 - 1)


def test_undivided_tasks_are_claimed_by_whoever_is_free(store: Store) -> None:
    first, second = runners(store)
    total = len(queue(SPEC, 0, 1))
    assert [second.claim(0).index, first.claim(0).index] == [0, 1]
    assert first.left(0) == second.left(0) == total - 2
