"""The planner skips what its floor says cannot win: the floor must not lie above what the
simulation finds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Literal

import pytest

from digenrl.extensions.planner.bound import step_bound
from digenrl.extensions.planner.costing import Costing
from digenrl.extensions.planner.floor import (
    _makespan,
    busiest_seconds,
    floor_seconds,
    training_floor,
)
from digenrl.extensions.planner.outcome import simulate_candidate
from digenrl.extensions.planner.workload import Workload
from digenrl.hardware import Hardware, Pool

FAST = Pool("fast", "H100", 4, "auto", 80, 989, 3.35, 450, 25, 8)
SLOW = Pool("slow", "RTX", 4, "auto", 80, 165, 1.0, 32, 25, 8)
FLUX = Workload("flux1_dev", 512, 512, 1, 6, 5, 8, 8, 2, False, 64, rewards=("pickscore",))


@pytest.mark.heavy
@pytest.mark.parametrize("pools", [(SLOW,), (FAST, SLOW)], ids=["equal", "unequal"])
@pytest.mark.parametrize(
    ("async_steps", "split", "trained"),
    [
        (0, "groups", None),
        (1, "samples", 4),
        pytest.param(1, "groups", None, marks=pytest.mark.slow),
        *(
            pytest.param(n, *how, marks=pytest.mark.slow)
            for n in (0, 1)
            for how in (("samples", None), ("groups", 2))
        ),
    ],
)
def test_no_simulated_step_is_shorter_than_its_floor(
    pools: tuple[Pool, ...],
    async_steps: int,
    split: Literal["groups", "samples"],
    trained: int | None,
) -> None:
    nodes = tuple(replace(pool, per_node=2) for pool in pools)
    costing = Costing(replace(FLUX, updates_split=split, trained_samples=trained), Hardware(nodes))
    bound, gpus, ratios = step_bound(costing), costing.hardware.gpus, []
    choices = itertools.product(
        (1, gpus // 2, gpus - 1, gpus), ("ddp", "hsdp", "fsdp"), (1, 4), (0, 4), (False, True)
    )
    for trainers, sharding, size, gap, lending in choices:
        if trainers == gpus and (lending or async_steps):
            continue
        base = costing.make_candidate(
            trainers, gpus - trainers, sharding=sharding, task_size=size, gap=gap, tag=lending
        )
        candidate = base.with_changes(shares=len(pools) > 1, async_steps=async_steps)
        if trainers == 1 and sharding != "ddp":
            continue
        run = costing.schedule_spec(candidate), costing.build_cluster(candidate)
        floor = max(floor_seconds(*run), busiest_seconds(*run))
        ratios.append(simulate_candidate(costing, candidate, bound, exact=True).step_s / floor)
    # Asynchronous steps are averaged over a window in whose course rollout ranks may gain or lose
    # part of a task.
    assert min(ratios) >= (0.98 if async_steps else 1.0 - 1e-9)
    assert min(ratios) < 1.2  # a floor far below everything would be no help


def test_whole_tasks_take_as_long_in_every_unit() -> None:
    """Ranks of 2, 3 and 3 s per task have made 3 tasks after 3 s, 4 after 4 s and 7 after 6 s."""
    for unit in (1.0, 1024.0, 1 / 1024):
        found = [_makespan(tasks, [2 * unit, 3 * unit, 3 * unit]) for tasks in (0, 1, 3, 4, 5, 7)]
        assert found == pytest.approx([s * unit for s in (0, 2, 3, 4, 6, 6)], rel=1e-4)
        assert all(
            s <= 1.0000001 * most * unit for s, most in zip(found, (0, 2, 3, 4, 6, 6), strict=True)
        )


def test_replicas_that_divide_the_steps_of_a_task_share_all_blocks_of_an_update() -> None:
    """Four groups of one task of five trained steps: twenty blocks on three ranks."""
    costing = Costing(FLUX, Hardware((replace(SLOW, count=8),)))
    candidate = costing.make_candidate(3, 5, sharding="ddp", task_size=8)
    spec, cluster = (
        replace(costing.schedule_spec(candidate), tsp_shard=True),
        costing.build_cluster(candidate),
    )
    assert (spec.groups_per_update, spec.tasks_per_portion, spec.blocks_per_task) == (4, 1, 5)
    cell = cluster.trainers[0].cell_seconds + cluster.trainers[0].exposed_seconds
    assert training_floor(spec, cluster)[1] == pytest.approx([7 * cell] * spec.updates_per_batch)


def test_the_busiest_of_unequal_replicas_bounds_the_step_where_fragments_have_few_blocks() -> None:
    """A group of one task of five steps has no block for three of the eight trainers."""
    costing = Costing(FLUX, Hardware((FAST, replace(SLOW, count=8))))
    base = costing.make_candidate(8, 4, sharding="ddp", task_size=8, gap=1, first="slow")
    candidate = base.with_changes(shares=True)
    step = simulate_candidate(costing, candidate, step_bound(costing), exact=True).step_s
    busiest = busiest_seconds(costing.schedule_spec(candidate), costing.build_cluster(candidate))
    assert 0.9 * step < busiest <= step
    assert costing.step_floor(candidate) < 0.7 * step


def test_sharded_trainers_pay_whole_rounds_for_each_fragment() -> None:
    costing = Costing(FLUX, Hardware((replace(SLOW, count=8),)))
    candidate = costing.make_candidate(3, 5, sharding="fsdp", task_size=8)
    spec, cluster = costing.schedule_spec(candidate), costing.build_cluster(candidate)
    cell = cluster.trainers[0].cell_seconds + cluster.trainers[0].exposed_seconds
    # One task of five trained steps: five blocks on three ranks take two rounds; four groups an
    # update.
    fragment, updates = training_floor(spec, cluster)
    assert fragment == pytest.approx(2 * cell)
    assert updates == pytest.approx([8 * cell] * 2)
    whole = candidate.with_changes(gap=4)
    assert training_floor(costing.schedule_spec(whole), costing.build_cluster(whole))[
        1
    ] == pytest.approx([7 * cell] * 2)
