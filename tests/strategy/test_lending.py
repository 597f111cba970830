"""TAG at run time: the search sees what other trainers generate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from digenrl.cluster.claims import Claims, Work
from digenrl.cluster.control import Control, host_store, join_store
from digenrl.cluster.world import World
from digenrl.schedule import ScheduleSpec, queue
from digenrl.strategy.lending import Lender

SPEC = ScheduleSpec(prompts=2, group_size=8, task_size=2, denoise_steps=4, trained_steps=3, gap=1, tag=True)
PENDING = ((0,), (1,))
TRAIN_S, TASK_S = 0.5, 1.0


@pytest.fixture(scope="module")
def server() -> dist.TCPStore:
    return host_store("127.0.0.1")


@pytest.mark.parametrize(("until", "lends"), [(2.5, True), (0.0, False)], ids=["lending", "done"])
def test_a_fragment_in_another_lenders_hands_is_not_ready(server: dist.TCPStore, until: float, lends: bool) -> None:
    """All of group 0 is claimed. Where trainer 1 still generates its last task, trainer 0 has time for a task of
    group 1; where nobody does, it only waits for the result, and must not begin anything (I6)."""
    prefix = f"lender-{lends}"
    ranks = [Claims(Control(join_store("127.0.0.1", server.port, prefix), rank), rank) for rank in range(3)]
    tasks = queue(SPEC, 0, 0)
    for _ in range(SPEC.tasks_per_group):
        ranks[1].take(0, tasks, range(len(tasks)))
    lender = Lender(SPEC, World(0, 2, 1), ranks[0])
    lender.measured("train", 0, TRAIN_S)
    for rank in range(3):
        lender.measured("generate", rank, TASK_S)
    ranks[2].announce(Work(0, TASK_S, TASK_S / 4))
    ranks[1].announce(Work(0, TASK_S, TASK_S / 4, 0, until) if until else Work(0, TASK_S, TASK_S / 4))
    assert (lender.decide(((), tasks), PENDING, 0, 0.0) > 0) == lends


def test_the_next_steps_tasks_fill_a_wait_for_older_ones(server: dist.TCPStore) -> None:
    """One-step asynchrony, every group stale: what step 1 still lacks only holders of version 0 may generate, so a
    trainer of version 1 lends to step 2 while it waits, and only then."""
    spec = replace(SPEC, async_steps=1, stale_fraction=1.0)
    ranks = [Claims(Control(join_store("127.0.0.1", server.port, "later"), rank), rank) for rank in range(2)]
    queues = queue(spec, 0, 2), queue(spec, 1, 2)
    for _ in range(len(queues[0]) - 2):
        ranks[1].take(0, queues[0], range(len(queues[0])))
    lender = Lender(spec, World(0, 1, 1), ranks[0])
    lender.measured("train", 0, TRAIN_S)
    for rank in range(2):
        lender.measured("generate", rank, TASK_S)
    ranks[1].announce(Work(0, TASK_S, TASK_S / 4, 1, 0.5))
    assert lender.decide(queues, PENDING[1:], 1, 0.0) == 2  # the rollout rank ends its three tasks after 2.5 s
    assert lender.decide((queues[0], ()), PENDING[1:], 1, 0.0) == 0
