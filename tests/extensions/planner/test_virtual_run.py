"""The engine over random specs, clusters, durations and failures: what must hold whatever the
schedule."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from digenrl.extensions.planner.floor import floor_seconds
from digenrl.extensions.planner.records import Simulated, settled_from
from digenrl.extensions.planner.virtual_cluster import (
    Cluster,
    Disturbance,
    VirtualRank,
    coarsen_run,
    micro_batches,
)
from digenrl.extensions.planner.virtual_run import simulate_run, simulate_until_steady
from digenrl.schedule import ScheduleSpec, group_version, place_fragment, update_fragments


@st.composite
def specs(draw: st.DrawFn, async_steps: int | None = None) -> ScheduleSpec:
    updates = draw(st.sampled_from([1, 2]))
    size = draw(st.sampled_from([1, 2]))
    within = updates > 1 and draw(st.booleans())
    return ScheduleSpec(
        prompts=(1 if within else updates) * draw(st.integers(1, 4)),
        group_size=size * (2 if within else 1) * draw(st.integers(1 if within else 2, 3)),
        task_size=size,
        denoise_steps=draw(st.integers(3, 6)),
        trained_steps=draw(st.integers(1, 3)),
        updates_per_batch=updates,
        updates_split="samples" if within else "groups",
        gap=draw(st.integers(0, 3)),
        tsp_batch=draw(st.integers(1, 3)),
        tsp_shard=draw(st.booleans()),
        tag=draw(st.booleans()),
        async_steps=draw(st.integers(0, 1)) if async_steps is None else async_steps,
        stale_fraction=draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])),
    )


@st.composite
def clusters(draw: st.DrawFn, least_rollouts: int = 0) -> Cluster:
    times, exposed = st.floats(0.01, 3.0), st.floats(0.0, 0.5)
    trainers, rollouts = draw(st.integers(1, 3)), draw(st.integers(least_rollouts, 4))
    ranks = [
        VirtualRank(
            i,
            "trainer",
            "t",
            draw(times),
            draw(times),
            draw(times),
            draw(times),
            draw(times),
            draw(exposed),
        )
        for i in range(trainers)
    ]
    for i in range(trainers, trainers + rollouts):
        own = (draw(times) for _ in range(4))
        ranks.append(VirtualRank(i, "rollout", "r", *own, adopt_seconds=draw(times)))
    small = st.floats(0.0, 0.5)
    return Cluster(
        tuple(ranks),
        lockstep=draw(st.booleans()),
        together=draw(st.integers(0, trainers)),
        reduce_seconds=draw(small),
        publish_seconds=draw(small),
        deliver_seconds=draw(small),
        switch_seconds=draw(small),
        static_claims=rollouts == 0 and draw(st.booleans()),
    )


PROPERTY = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check(spec: ScheduleSpec, cluster: Cluster, steps: int, disturbance: Disturbance) -> Simulated:
    result = simulate_run(
        spec, cluster, steps, disturbance, trace=True
    )  # raises when it halts or names no cause
    trainers = len(cluster.trainers)
    made = Counter((step, task) for step, task, _, _ in result.made)
    for step in range(steps):
        assert all(made[step, task] == 1 for task in range(spec.tasks))  # generated once
        cells: Counter[tuple[int, int, int]] = Counter()
        for trained_step, rank, groups in result.trained:
            if trained_step == step:
                for micro in place_fragment(spec, trainers, groups)[rank]:
                    cells.update((b.group, b.part, s) for b in micro for s in b.steps)
        assert set(cells.values()) == {1}  # I2: trained once
        assert len(cells) == spec.tasks * spec.trained_steps
    for step, task, _, version in result.made:
        assert version == group_version(spec, step, task // spec.tasks_per_group)  # I7, I8
    assert result.staleness_max <= spec.async_steps  # I9
    assert result.ledger.trained == steps * spec.prompts * spec.group_size  # I10
    assert result.ledger.in_flight == 0
    if cluster.reduce_seconds > 1e-6:  # what takes no time has no span
        updates = Counter(span.rank for span in result.spans if span.stage == "optimizer")
        assert updates == {rank.rank: steps * spec.updates_per_batch for rank in cluster.trainers}
    return result


@PROPERTY
@given(specs(), clusters(), st.floats(0.0, 0.5), st.integers(0, 99))
def test_i2_i7_i8_i9_i10_every_cell_once_with_its_version(
    spec: ScheduleSpec, cluster: Cluster, jitter: float, seed: int
) -> None:
    if not cluster.rollouts:
        spec = ScheduleSpec(**{**vars(spec), "async_steps": 0})
    check(spec, cluster, 3, Disturbance(jitter, seed, {0: 2.0}))


@PROPERTY
@given(specs(), clusters(least_rollouts=2), st.floats(0.0, 20.0), st.integers(0, 9))
def test_i2_i10_a_rollout_death_loses_nothing(
    spec: ScheduleSpec, cluster: Cluster, when: float, which: int
) -> None:
    victim = cluster.rollouts[which % (len(cluster.rollouts) - 1)].rank  # at least one survives
    result = check(spec, cluster, 2, Disturbance(failures=((when, victim),), detect_seconds=1.0))
    began = [s.start for s in result.spans if (s.rank, s.stage) == (victim, "generate")]
    assert max(began, default=0.0) <= when, "it lives on"


@settings(deadline=None)
@given(specs(), st.integers(1, 5))
def test_i3_equal_micro_batches_on_every_rank(spec: ScheduleSpec, trainers: int) -> None:
    for update in range(spec.updates_per_batch):
        for fragment in update_fragments(spec, update):
            placement = place_fragment(spec, trainers, fragment)
            assert len({len(micro) for micro in placement}) == 1
    blocks = [
        block
        for update in range(spec.updates_per_batch)
        for fragment in update_fragments(spec, update)
        for rank in place_fragment(spec, trainers, fragment)
        for micro in rank
        for block in micro
    ]
    cells = sum(len(block.steps) for block in blocks) * spec.task_size
    assert len({(block.group, block.part, block.steps) for block in blocks}) == len(blocks)
    assert (
        cells == spec.cells_per_update * spec.updates_per_batch
    )  # the denominators count every cell


def even(trainers: int, rollouts: int, **settings: float) -> Cluster:
    ranks = [VirtualRank(i, "trainer", "p", 1.0, cell_seconds=1.0) for i in range(trainers)]
    ranks += [VirtualRank(trainers + i, "rollout", "p", 1.0) for i in range(rollouts)]
    return Cluster(tuple(ranks), **settings)  # type: ignore[arg-type]


BASE = {"prompts": 8, "group_size": 8, "task_size": 2, "denoise_steps": 6, "trained_steps": 6}


def test_each_mechanism_shortens_the_step() -> None:
    def step(trainers: int = 4, rollouts: int = 4, **changes: object) -> float:
        return simulate_run(ScheduleSpec(**{**BASE, **changes}), even(trainers, rollouts), 4).step_s  # type: ignore[arg-type]

    sync = step()
    gap = step(gap=1)
    tsp = step(gap=1, tsp_shard=True)
    tag = step(gap=1, tsp_shard=True, tag=True)
    full = step(gap=1, tsp_shard=True, tag=True, async_steps=1)
    bound = (32 * 6 + 32 * 6) / 8
    assert sync == pytest.approx(96.0)  # half of the ranks waits at any time
    assert sync > gap >= tsp >= tag
    assert full < 1.1 * bound
    assert full < tag


def test_fast_trainers_begin_with_the_first_fragment() -> None:
    """Trainers generate four times as fast as rollouts, and each role is idle when a step begins.
    Trainers make the first fragment (two rounds) and train it while rollouts make the second."""
    work = {**BASE, "prompts": 2, "group_size": 8}
    spec = ScheduleSpec(**work, gap=1, tsp_shard=True, tag=True)  # type: ignore[arg-type]
    ranks = [VirtualRank(i, "trainer", "p", 1 / 3, cell_seconds=0.25) for i in range(2)]
    ranks += [VirtualRank(2 + i, "rollout", "p", 4 / 3) for i in range(4)]
    run = simulate_run(spec, Cluster(tuple(ranks), publish_seconds=0.5), 4)
    assert run.step_s == pytest.approx(0.5 + 8.0 + 3.0, abs=0.01)
    made = {(task, rank < 2) for step, task, rank, _ in run.made if step == 3}
    assert made == {(task, task < 4) for task in range(8)}
    alone = simulate_run(replace(spec, tag=False), Cluster(tuple(ranks), publish_seconds=0.5), 4)
    assert alone.step_s == pytest.approx(0.5 + 8.0 + 8.0 + 3.0, abs=0.01)


def test_whole_stale_batches_share_the_next_step_between_lenders_and_rollouts() -> None:
    """Generation is 3/5 of the work of half of the ranks. With gap=0 the first of two updates waits
    for the whole batch, so trainers have time to lend in every step. If they lent all or nothing,
    every second step would leave one side without work."""
    work = {**BASE, "group_size": 24, "updates_per_batch": 2}
    spec = ScheduleSpec(**work, tsp_shard=True, async_steps=1, stale_fraction=1.0)
    ranks = [VirtualRank(i, "trainer", "p", 1.0, cell_seconds=2 / 3) for i in range(8)]
    cluster = Cluster((*ranks, *(VirtualRank(8 + i, "rollout", "p", 1.0) for i in range(8))))
    bound = 96 * 6 * (1 + 2 / 3) / 16
    alone, lending = (
        simulate_until_steady(replace(spec, tag=tag), cluster, steps=20) for tag in (False, True)
    )
    assert alone.step_s == pytest.approx(96 * 6 / 8)
    assert lending.step_s < 1.05 * bound
    steps = [after - before for before, after in pairwise(lending.step_ends)][4:]
    assert max(steps) < 1.2 * min(steps)
    assert not lending.messages


def test_lockstep_pays_the_slowest_rank_and_communication() -> None:
    spec = ScheduleSpec(**BASE, tsp_shard=True)
    ranks = (
        VirtualRank(0, "trainer", "p", 1.0, cell_seconds=1.0),
        VirtualRank(1, "trainer", "p", 1.0, cell_seconds=3.0),
    )
    rollout = VirtualRank(2, "rollout", "p", 0.001)
    free = simulate_run(spec, Cluster((*ranks, rollout), lockstep=True), 1).step_s
    exposed = (replace(rank, exposed_seconds=0.5) for rank in ranks)
    paid = simulate_run(spec, Cluster((*exposed, rollout), lockstep=True), 1).step_s
    micro = 32 * 6 // 2
    assert free == pytest.approx(3.0 * micro, rel=0.01)
    assert paid - free == pytest.approx(0.5 * micro, rel=1e-6)


def test_shares_follow_speed() -> None:
    ranks = (
        VirtualRank(0, "trainer", "p", 1.0, cell_seconds=1.0),
        VirtualRank(1, "trainer", "p", 1.0, cell_seconds=3.0),
    )
    cluster = Cluster((*ranks, VirtualRank(2, "rollout", "p", 0.001)))
    equal = simulate_run(ScheduleSpec(**BASE, tsp_shard=True), cluster, 1).step_s
    shared = simulate_run(
        ScheduleSpec(**BASE, tsp_shard=True, shares=(3.0, 1.0)), cluster, 1
    ).step_s
    assert shared == pytest.approx(equal / 2, rel=0.02)


def test_a_trainer_death_is_refused() -> None:
    with pytest.raises(ValueError, match="only rollout ranks die alone"):
        simulate_run(ScheduleSpec(**BASE), even(1, 1), 1, Disturbance(failures=((0.5, 0),)))


def irregular(mean: float, growth: float = 1.0, spread: float = 1.0) -> list[float]:
    """Ten steps and the same ten in another order, without any period, after a long one."""
    parts = [0.0, 3.0, -2.0, 1.0, 4.0, -3.0, 2.0, -4.0, -1.5, 0.5]
    steps = [mean * (1.0 + 0.01 * spread * part) for part in parts]
    return [9.0, *steps, *(growth * steps[i] for i in (6, 1, 8, 0, 9, 4, 7, 2, 5, 3))]


@pytest.mark.parametrize(
    ("steps", "first"),
    [
        ([9.0, 2.0, 2.0, 2.0, 2.0], 1),
        ([9.0, 1.0, 3.0, 1.0, 3.0], 1),
        ([9.0, *[1.0, 2.0, 3.0] * 4], 1),
        ([1.0, 1.0, 1.0, 3.0, 3.0, 3.0], None),
        ([2.0 * 1.0015**n for n in range(20)], 0),
        ([2.0 * 1.01**n for n in range(20)], None),
        ([1.0] * 6, None),
        ([1.0], None),
        ([2.0, 2.0], 0),
        ([2.0, 3.0], None),
        (irregular(2.0), 1),
        (irregular(2.0, 1.001), 1),
        (irregular(2.0, 1.003), None),
        (irregular(2.0, 0.997), None),
        (irregular(2.0, spread=1.5), None),
        (irregular(1.4985), 1),
        (irregular(1.4), None),
    ],
    ids=[
        "equal",
        "of-two",
        "of-three",
        "a-change",
        "creeping",
        "growing",
        "consuming",
        "one",
        "two",
        "unlike",
        "irregular",
        "irregular, creeping",
        "irregular, growing",
        "irregular, shrinking",
        "wild",
        "irregular, short",
        "irregular, consuming",
    ],
)
def test_a_window_of_steps_is_steady(steps: list[float], first: int | None) -> None:
    """`first`: the step whose end begins the window. A step that differs from the one before by
    less than the tolerance is a repetition with period 1."""
    assert settled_from([0.0, *itertools.accumulate(steps)], least=1.5) == first


def test_a_buffer_that_is_being_emptied_is_no_speed() -> None:
    """Rollouts that are 20% too slow live on what they made while training began; the steady step
    is theirs."""
    spec = ScheduleSpec(**BASE, gap=1, tsp_shard=True, async_steps=1)
    ranks = [VirtualRank(i, "trainer", "p", 1.0, cell_seconds=0.8) for i in range(4)]
    cluster = Cluster((*ranks, *(VirtualRank(4 + i, "rollout", "p", 1.0) for i in range(4))))
    found = simulate_until_steady(spec, cluster)
    assert found.settled
    assert found.step_s == pytest.approx(32 * 6 / 4, rel=0.01)  # generation's work over its ranks
    assert simulate_until_steady(spec, cluster, steps=26).step_s == pytest.approx(
        found.step_s, rel=0.01
    )


def test_two_windows_that_agree_by_chance_are_no_steady_step() -> None:
    """Two rollouts that take turns with a slow beat: windows of five steps agree at 9.6, and the
    mean is 9.85."""
    ranks = (
        VirtualRank(0, "trainer", "t", 1.0, 1.0, 1.0, 1.0, 1.0),
        VirtualRank(1, "rollout", "r", 1.0, 0.5, 1.25, 0.5, adopt_seconds=1.0),
        VirtualRank(2, "rollout", "r", 1.0, 1.0, 1.0, 1.5, adopt_seconds=2.0),
    )
    spec = ScheduleSpec(1, 3, 1, 3, 1, gap=0, async_steps=1, stale_fraction=0.3)
    found, long = (
        simulate_until_steady(spec, Cluster(ranks)),
        simulate_until_steady(spec, Cluster(ranks), steps=160),
    )
    assert not found.settled or found.step_s == pytest.approx(long.step_s, rel=0.005)


@pytest.mark.heavy
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs(), clusters(least_rollouts=1))
def test_a_settled_step_is_that_of_a_longer_run(spec: ScheduleSpec, cluster: Cluster) -> None:
    """Without lending, which may switch itself off long afterwards."""
    spec = replace(spec, tag=False)
    found = simulate_until_steady(spec, cluster)
    if found.settled:
        assert simulate_until_steady(spec, cluster, steps=40).step_s == pytest.approx(
            found.step_s, rel=0.02
        )


@pytest.mark.parametrize(
    ("context", "size", "updates", "split"),
    [(1, 1, 2, "groups"), (2, 2, 1, "groups"), (1, 1, 2, "samples")],
)
def test_micro_batches_are_those_of_the_runtimes_placement(context, size, updates, split) -> None:
    """One placement serves all fragments of a length; it must be that of each of them."""
    spec = ScheduleSpec(
        prompts=10, group_size=4, task_size=size, denoise_steps=4, trained_steps=3,
        updates_per_batch=updates, updates_split=split, gap=3, tsp_batch=2, tsp_shard=True,
        context=context, tag=True,
    )  # fmt: skip
    ranks = tuple(VirtualRank(n, "trainer", "a", 1.0, cell_seconds=n + 1.0) for n in range(6))
    for fragment in update_fragments(spec, updates - 1):
        expected = tuple(
            tuple((n + 1.0) * sum(len(block.steps) for block in micro) for micro in own)
            for n, own in enumerate(place_fragment(spec, 6, fragment))
        )
        assert micro_batches(spec, Cluster(ranks), fragment) == expected


def test_coarse_run_of_equal_ranks_takes_as_long_as_the_whole_run() -> None:
    spec = ScheduleSpec(**{**BASE, "group_size": 64, "task_size": 1}, gap=1, tsp_shard=True)
    cluster = even(16, 16, reduce_seconds=0.3, deliver_seconds=0.1)
    smaller, fewer = coarsen_run(spec, cluster, 8)
    assert len(fewer.ranks) == 8 < len(cluster.ranks)
    assert simulate_until_steady(smaller, fewer).step_s == pytest.approx(
        simulate_until_steady(spec, cluster).step_s, rel=0.01
    )


@pytest.mark.parametrize("together", [0, 8])
def test_coarse_run_of_sharded_trainers_waits_for_the_fullest_of_the_ranks(together: int) -> None:
    """A third of the samples has a gradient, and not the same number on each rank: four ranks as
    one would not show it."""
    numbers = {
        "prompts": 32,
        "group_size": 24,
        "task_size": 1,
        "denoise_steps": 9,
        "trained_steps": 9,
    }
    spec = ScheduleSpec(**{**BASE, **numbers}, gap=1, tsp_shard=True)
    whole = replace(even(16, 16), lockstep=True, together=together, useful=1 / 3)
    whole = replace(whole, ranks=tuple(replace(rank, cell_seconds=9.0) for rank in whole.ranks))
    smaller, fewer = coarsen_run(spec, whole, 8)
    exact, quick, blind = (
        simulate_until_steady(spec, cluster).step_s
        for spec, cluster in (
            (spec, whole),
            (smaller, fewer),
            (smaller, replace(fewer, whole=None)),
        )
    )
    assert len(fewer.ranks) == 8
    assert quick == pytest.approx(exact, rel=0.01)
    assert blind < 0.9 * exact
    assert 0.9 * exact < floor_seconds(spec, whole) <= exact


def test_groups_of_sharded_trainers_wait_for_their_own_and_at_the_update() -> None:
    """Of two nodes one is three times as fast. With shares both train as long as replicas would. In
    lock-step of all trainers, everybody would wait for the fast ones' second and third block of a
    micro-batch."""
    spec = ScheduleSpec(**BASE, tsp_shard=True, shares=(3.0, 3.0, 1.0, 1.0))
    ranks = [
        VirtualRank(i, "trainer", "p", 1.0, cell_seconds=1.0 if i < 2 else 3.0) for i in range(4)
    ]
    cluster = Cluster((*ranks, VirtualRank(4, "rollout", "p", 0.001)))
    replicas, nodes, everyone = (
        simulate_run(spec, replace(cluster, lockstep=lockstep, together=together), 1).step_s
        for lockstep, together in ((False, 0), (True, 2), (True, 0))
    )
    assert nodes == pytest.approx(replicas, rel=0.02)
    assert everyone > 1.3 * nodes


def test_no_group_of_sharded_trainers_is_ahead_of_the_first() -> None:
    """Trainer 0 begins every micro-batch: of equal parts the fast node has done two of three when
    the slow one ends."""
    spec = ScheduleSpec(**{**BASE, "prompts": 1, "trained_steps": 3}, tsp_shard=True)
    cells = (2.0, 2.0, 1.0, 1.0)
    ranks = [VirtualRank(i, "trainer", "p", 1.0, cell_seconds=cell) for i, cell in enumerate(cells)]
    cluster = Cluster((*ranks, VirtualRank(4, "rollout", "p", 0.001)), lockstep=True, together=2)
    spans = [
        span for span in simulate_run(spec, cluster, 1, trace=True).spans if span.stage == "train"
    ]
    ends = {span.rank: span.end - span.start for span in spans}
    assert ends[0] == pytest.approx(3 * 2.0)
    assert ends[2] == pytest.approx(2 * 2.0 + 1.0)


def test_jitter_of_many_micro_batches_evens_out() -> None:
    """Each micro-batch has its own factor. With one factor for a whole update, the slowest of 8
    replicas would be 7% behind."""
    spec = ScheduleSpec(**{**BASE, "group_size": 32, "task_size": 1}, tsp_shard=True)
    cluster = even(8, 0)
    calm = simulate_until_steady(spec, cluster, steps=8).step_s
    assert (
        1.0
        < simulate_until_steady(spec, cluster, 8, disturbance=Disturbance(jitter=0.05)).step_s
        / calm
        < 1.05
    )
    held = replace(cluster, lockstep=True)
    assert (
        simulate_until_steady(spec, held, 8, disturbance=Disturbance(jitter=0.05)).step_s / calm
        > 1.06
    )
