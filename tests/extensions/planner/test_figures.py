"""All figures of a few plans, against those that were there before (`figures.txt`).

A difference is no fault by itself. Whoever changes a formula, an assumption or a choice reads in it
what has moved, and how far, and writes the new figures:

    python -m tests.extensions.planner.test_figures
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import io
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, is_typeddict

import pytest
import yaml

from digenrl import config as configuration
from digenrl.advisor import ModelPlacement
from digenrl.extensions import planner
from digenrl.extensions.planner import costs, gpus
from digenrl.extensions.planner.advice import PlannerAdvisor, planned_split
from digenrl.extensions.planner.bound import (
    bound_of_roles,
    seconds_per_unit,
    step_bound,
    work_units,
)
from digenrl.extensions.planner.candidate import Candidate
from digenrl.extensions.planner.cli import plan as plan_command
from digenrl.extensions.planner.cli.plan import booking_of
from digenrl.extensions.planner.costing import Costing
from digenrl.extensions.planner.counts import (
    attention_flops,
    backward_flops,
    beside_bytes,
    decode_flops,
    encode_flops,
    forward_bytes,
    forward_flops,
    generating_flops,
    kept_bytes,
    repeated_bytes,
    repeated_flops,
)
from digenrl.extensions.planner.enumeration import (
    _around_balance,
    _balanced_trainers,
    _schedule_candidates,
    colocated_candidates,
    context_sizes,
    disaggregated_candidates,
    fit_candidate,
    is_allowed,
    neighbour_candidates,
    promising_candidates,
    step_batches,
    task_sizes,
)
from digenrl.extensions.planner.evaluation import evaluation_seconds
from digenrl.extensions.planner.floor import busiest_seconds, floor_seconds, training_floor
from digenrl.extensions.planner.links import (
    adopt_seconds,
    deliver_seconds,
    exposed_seconds,
    fetch_seconds,
    publish_seconds,
    reduce_seconds,
    ring_bandwidth,
    send_seconds,
    snapshot_seconds,
    task_bytes,
)
from digenrl.extensions.planner.measured import computed_seconds, with_measured
from digenrl.extensions.planner.memory import decode_bytes, moment_bytes, saved_bytes
from digenrl.extensions.planner.outcome import simulate_candidate
from digenrl.extensions.planner.plan_text import (
    Booking,
    as_json,
    booking_lines,
    candidate_table,
    eligible_outcomes,
    explain_winner,
)
from digenrl.extensions.planner.planner import PlanError, _apply_choices, make_plan, sync_run
from digenrl.extensions.planner.reading import candidate_of, costing_of, fixed_choices
from digenrl.extensions.planner.remedies import find_remedy
from digenrl.extensions.planner.scoring import (
    judge_flops,
    judge_seconds,
    score_cpu_seconds,
    score_flops,
)
from digenrl.extensions.planner.virtual_cluster import (
    Cluster,
    Disturbance,
    VirtualRank,
    coarsen_run,
)
from digenrl.extensions.planner.virtual_run import (
    DeadlockError,
    simulate_run,
    simulate_until_steady,
)
from digenrl.extensions.planner.workload import Drawn, Workload
from digenrl.hardware import Hardware, Line, Pool
from digenrl.recompute import Recompute
from digenrl.schedule import ScheduleSpec
from digenrl.settle import with_task_size
from tests.schedule.test_figures import Drawing

STORED = Path(__file__).with_name("figures.txt")

FAST = Pool("fast", "H100", 4, "auto", 80, 989, 3.35, 450, 25, 4)
SLOW = Pool(
    "slow", "L40S", 4, "auto", 48, 362, 0.864, 32, 12, 2, 256,
    efficiency=(("launch_seconds", 9e-4), ("hidden", 0.6), ("trained", 1.25)),
)  # fmt: skip
LINE = Line(0.0125, 0.02)
FLUX = Workload("flux1_dev", 512, 512, 1, 6, 5, 4, 8, 2, False, 64, rewards=("pickscore", "ocr"))
VIDEO = Workload(
    "hunyuan_video", 480, 832, 53, 16, 9, 8, 12, 1, False, None, reference=True, ema=True,
    engine="compiled", fused_attention=True, rewards=("video_align",), heldout=("pickscore",),
    evaluated=4, rollouts_evaluate=True, storage_bytes=4, most_text=77,
)  # fmt: skip
GUIDED = Workload(
    "sd35_medium", 512, 512, 1, 10, 4, 6, 8, 2, True, 32, "attn", rewards=("clip_score", "jpeg"),
    judged=("vlm_judge", "hpsv3"), base_bytes=0.5625, trained_samples=4, oversample=2,
    detached=True, stored_prompts=True, whole_batch=True, updates_split="samples", evaluated=8,
)  # fmt: skip
WAN = Workload(
    "wan21_14b", 480, 832, 33, 8, 8, 2, 4, 1, True, 16, passes_apart=True, engine="engine",
    most_text=512, ema=True, reference=True,
)  # fmt: skip
WORKS = {"flux": FLUX, "video": VIDEO, "guided": GUIDED, "wan": WAN}
PARTLY = Recompute(products=0.25, attention=0.25, inputs=0.25)
KEPT = (Recompute(), Recompute(inputs=1.0), PARTLY, Recompute(offload=0.5))


def shown(value: Any) -> str:
    """Return a value as words: six digits of a number, and a dataclass by what it was given."""
    match value:
        case float():
            return f"{value:.6g}"
        case Pool():
            return value.name
        case Costing():
            return ""
        case _ if is_dataclass(value):
            given = ((f.name, getattr(value, f.name), f.default) for f in fields(value) if f.repr)
            return shown({name: v for name, v, default in given if v != default})
        case Mapping():
            return " ".join(f"{shown(key)}={shown(v)}" for key, v in value.items())
        case str() | bytes():
            return str(value)
        case set() | frozenset():
            return shown(sorted(map(shown, value)))
        case Iterable():
            return f"({', '.join(map(shown, value))})"
    return str(value)


def hashed(value: Any) -> str:
    """Return a short name of a value that would be long to show."""
    return hashlib.sha1(shown(value).encode()).hexdigest()[:10]


def all_of(thing: Any) -> Iterator[str]:
    """Yield `name value` of every property, and of every method that takes no argument."""
    for name, member in inspect.getmembers_static(type(thing)):
        if name.startswith("_") or isinstance(member, staticmethod):
            continue
        value = getattr(thing, name)
        if callable(value):
            if inspect.signature(value).parameters:
                continue
            value = value()
        yield f"{name} {shown(value)}"


def of_gpus() -> Iterator[str]:
    for name, gpu in gpus.GPUS.items():
        pool = replace(FAST, gpu=name)
        yield f"{name}: {shown(gpu)}, {gpus.kind_of(name).published}"
        yield f"  {shown(vars(gpus.efficiency_of(pool)))}"
    for name in ("NVIDIA H100 PCIe", "nvidia-l40s-48gb", "RTX", "A100-SXM4"):
        yield f"{name}: {shown(gpus.find_gpu(name))}"
    yield shown({name: vars(engine) for name, engine in gpus.ENGINES.items()})
    yield shown((gpus.BACKWARD_LAUNCHES, gpus.SCALED))


COUNTS: tuple[Callable[[Workload], float], ...] = (
    attention_flops, backward_flops, decode_flops, encode_flops, forward_flops, generating_flops,
)  # fmt: skip


def of_work(work: Workload) -> Iterator[str]:
    judged = f"judge_flops {shown(judge_flops(work.judged))}"
    scored = f"score_flops {shown(score_flops(work.rewards))}"
    delayed = f"score_cpu_seconds {shown(score_cpu_seconds(work.rewards))}"
    counted = [f"{count.__name__} {shown(count(work))}" for count in COUNTS]
    lines = sorted([*all_of(work), *counted, judged, scored, delayed])
    yield from (
        line
        for line in lines
        if not line.startswith(("facts ", "sizes ", *(f"{f.name} " for f in fields(work))))
    )
    for mode in ("all", "products", "attention", "inputs"):
        kept = [kept_bytes(work, mode, rows, context) for rows in (1, 6) for context in (1, 2)]
        row = *kept, repeated_flops(work, mode), repeated_bytes(work, mode)
        yield f"{mode}: {shown(row if mode != 'all' else kept)}"
    beside = [
        beside_bytes(work, mode, rows, context)
        for mode in ("all", "inputs")
        for rows in (1, 6)
        for context in (1, 2)
    ]
    yield f"beside {shown(beside)} forward {shown(map(partial(forward_bytes, work), (1, 6)))}"
    for kept in KEPT:
        both = [(f(work, 6, kept), f(work, 6, kept, 2)) for f in (saved_bytes, moment_bytes)]
        yield f"{shown(kept)}: {shown(both)}"
    yield f"decode {decode_bytes(work)} {decode_bytes(replace(work, height=128, width=128))}"


def of_costs(work: Workload) -> Iterator[str]:
    judging = replace(FAST, judges=2, per_node=3, name="judging")
    measured = {stage: {"slow": 0.25} for stage in ("encode", "generate", "decode", "score")}
    for hardware in (
        Hardware((FAST, SLOW, judging), lines={frozenset(("fast", "slow")): LINE}),
        Hardware((SLOW,), {**measured, "train": {"slow": 0.5}}),
    ):
        own, pools = costs.Costs(work, hardware), list(hardware.pools)
        yield shown((own.judged_seconds(), adopt_seconds(work), snapshot_seconds(work, pools)))
        for pool in pools:
            yield f"{pool.name} {shown(own.figure_source(stage, pool) for stage in costs.STAGES)}"
            yield shown(own.step_seconds(pool, size) for size in (1, 8))
            yield shown(own.encode_seconds(pool, cached) for cached in (True, False))
            yield shown(own.decode_seconds(pool, 3, cached) for cached in (True, False))
            yield shown((own.score_seconds(pool, 3), judge_seconds(own.work, pool)))
            for kept in KEPT:
                cells = [own.cell_seconds(pool, *rows, kept) for rows in ((1, 1), (1, 4), (4, 2))]
                yield shown((*cells, own.cell_seconds(pool, 4, 2, kept, 2)))
            yield shown(own.optimizer_seconds(pool, shards) for shards in (1, 4))
            yield shown(exposed_seconds(pool, *s) for s in ((1.0, 0.1), (1.0, 9.0)))
        for some in ([pools[0]], pools):
            yield shown(ring_bandwidth(some, ranks) for ranks in (2, 8))
            yield shown(own.sharding_seconds(some, shards) for shards in (1, 2, 8))
            yield shown((own.gather_seconds(some, 4), own.gather_seconds(some, 4, 4)))
            yield shown(reduce_seconds(own.work, some, *n) for n in ((1,), (4,), (2, 4)))
            published = map(partial(publish_seconds, work, some), (0, 3))
            yield shown((*published, task_bytes(work, 3)))
            yield shown((deliver_seconds(own.work, some, 3),))
    yield shown((send_seconds(own.work, LINE, 3), fetch_seconds(own.work, LINE, 2)))


def of_cluster(cluster: Cluster) -> Iterator[str]:
    last = {replace(rank, rank=0): rank.rank for rank in cluster.ranks}
    yield from (f"  ..{number} {shown(rank)}" for rank, number in last.items())
    yield f"  {shown({k: v for k, v in vars(cluster).items() if k not in ('ranks', 'whole')})}"


def of_costing(work: Workload) -> Iterator[str]:
    one = Costing(work, Hardware((replace(FAST, count=8),)))
    two = Costing(work, Hardware((FAST, SLOW), lines={frozenset(("fast", "slow")): LINE}))
    drawn = Drawn(5, 4, 12, 2)
    some = (one, replace(one, hardware=Hardware((FAST, SLOW))), two)
    for costing in some if work in (FLUX, VIDEO) else some[:1]:
        yield f"bound {shown(step_bound(costing))} {shown(seconds_per_unit(costing))}"
        yield f"{shown(work_units(costing.work))} {shown(costing.costs.figure_sources())}"
        for trainers, rollouts, choices in (
            (8, 0, {"sharding": "fsdp", "tsp_batch": 2}),
            (4, 4, {"tag": True, "encoders": True}),
            (6, 2, {"sharding": "hsdp", "shares": True, "task_size": 2, "async_steps": 1}),
            (4, 4, {"sharding": "fsdp", "context": 2, "recompute": PARTLY, "first": "fast"}),
            (2, 6, {"sharding": "hsdp", "shard_group": 2, "recompute": KEPT[-1]}),
        ):
            held = costing.make_candidate(trainers, rollouts, **choices)
            if not is_allowed(costing, held):
                continue
            yield f"{trainers}+{rollouts} {held.name} {shown(choices)}"
            for where, memory in costing.rank_memory(held).items():
                yield f"  {shown(where)} {shown(vars(memory))} {memory.gib:.3f}"
            yield f"  {'; '.join(costing.find_misfits(held))} {shown(costing.host_gib(held))}"
            yield from of_cluster(costing.build_cluster(held))
            seconds = costing.cell_seconds(held), costing.least_cell_seconds(held)
            yield f"  {shown((*seconds, costing.step_floor(held), bound_of_roles(costing, held)))}"
            yield f"  {shown(costing.schedule_spec(held).shares)} {shown(context_sizes(costing, held))}"
            kept = [
                costing.choose_recompute(held, pool)
                for pool, _ in costing.place_ranks(held).trainers_by_pool
            ]
            yield f"  {shown(kept)} {shown(evaluation_seconds(costing, drawn, held))}"
            yield f"  {find_remedy(costing, held)}"


SPEC = ScheduleSpec(4, 6, 2, 4, 3, gap=1, tsp_shard=True)
RANKS = [VirtualRank(i, "trainer", "t", 1.0, 0.3, 0.2, 0.1, 0.7, 0.05) for i in range(4)]
RANKS += [
    VirtualRank(4 + i, "rollout", "r", 0.8, 0.4, 0.2, 0.15, adopt_seconds=0.25) for i in range(4)
]
AFAR = [replace(rank, pool="f", fetch_seconds=0.6, send_seconds=0.35) for rank in RANKS[6:]]
SET = {
    "reduce_seconds": 0.2, "optimizer_seconds": 0.1, "snapshot_seconds": 0.15, "publish_seconds": 0.4,
    "deliver_seconds": 0.12, "switch_seconds": 0.06,
}  # fmt: skip
RUNS: dict[str, tuple[ScheduleSpec, Cluster, Disturbance]] = {}
for _name, _spec, _ranks, _cluster, _disturbance in (
    ("plain", {"gap": 0, "tsp_shard": False}, RANKS, {}, {}),
    ("lending", {"tag": True, "updates_per_batch": 2}, RANKS, {}, {}),
    ("stale", {"tag": True, "async_steps": 1, "stale_fraction": 0.5}, RANKS, {}, {}),
    ("whole", {"gap": 0, "async_steps": 1, "stale_fraction": 1.0}, RANKS, {}, {}),
    ("useful", {"task_size": 1, "tag": True}, RANKS, {"useful": 0.5}, {}),
    ("rows", {"gap": 2}, RANKS, {"useful": 0.5}, {}),
    ("units", {"tag": True}, RANKS, {"lockstep": True, "together": 2}, {}),
    ("shared", {}, RANKS, {"lockstep": True}, {}),
    ("colocated", {}, RANKS[:4], {}, {}),
    ("split", {"task_size": 1, "gap": 0}, RANKS[:3], {"static_claims": True, "lockstep": True}, {}),
    ("far", {"async_steps": 1, "stale_fraction": 0.5}, [*RANKS[:6], *AFAR], {}, {}),
    ("jitter", {"tag": True}, RANKS, {}, {"jitter": 0.1, "seed": 3, "stragglers": {5: 2.0, 1: 1.5}}),
    ("deaths", {}, RANKS, {}, {"failures": ((3.0, 5), (40.0, 7)), "detect_seconds": 1.5}),
    ("late", {"async_steps": 1, "stale_fraction": 1.0}, RANKS, {}, {"failures": ((9.0, 6),)}),
    ("shares", {"shares": (2.0, 1.0, 1.0, 1.0), "tsp_batch": 2}, RANKS, {}, {}),
    ("uneven", {"prompts": 3}, RANKS[:4], {"lockstep": True, "together": 2}, {}),
    ("context", {"context": 2}, RANKS, {"lockstep": True, "together": 2}, {}),
):  # fmt: skip
    RUNS[_name] = (
        replace(SPEC, **_spec),
        Cluster(tuple(_ranks), **{**SET, **_cluster}),
        Disturbance(**_disturbance),
    )


def of_run(spec: ScheduleSpec, cluster: Cluster, disturbance: Disturbance) -> Iterator[str]:
    told: list[Any] = []
    record = lambda *args, **more: told.append((args, more))  # noqa: E731
    found = simulate_run(spec, cluster, 4, disturbance, trace=True, record=record)
    yield f"ends {shown(found.step_ends)} stale {found.staleness_max} {shown(found.messages)}"
    yield f"seconds {shown(found.seconds)}"
    parts = hashed(found.made), hashed(found.trained), hashed(vars(span) for span in found.spans)
    yield f"made, trained, spans, told {shown((*parts, hashed(told), len(told)))}"
    settled = simulate_until_steady(spec, cluster, disturbance=disturbance)
    yield f"steady {shown((settled.step_s, settled.steps, settled.settled))}"
    cut = simulate_until_steady(spec, cluster, cutoff_s=0.9 * settled.step_s)
    yield f"cut {shown((len(cut.step_ends), cut.step_s, cut.settled))}"


def of_coarse() -> Iterator[str]:
    """Yield smaller runs that stand for larger ones."""
    trainers = [replace(RANKS[0], rank=i, cell_seconds=0.7 + (i >= 14) / 10) for i in range(20)]
    rollouts = [replace(RANKS[4], rank=20 + i, send_seconds=0.1 * (i >= 8)) for i in range(13)]
    ranks = tuple(trainers + rollouts)
    for options, group, fewest in (
        ({}, 24, 8),
        ({"lockstep": True, "together": 6}, 24, 8),
        ({"lockstep": True, "together": 2}, 120, 1),
        ({"context": 2, "lockstep": True, "together": 4}, 120, 4),
        ({"shares": tuple(1.0 + (i < 14) for i in range(20))}, 60, 4),
        ({"shares": tuple(1.0 + (i < 13) for i in range(20))}, 60, 4),
        ({}, 600, 5),
        ({}, 2, 8),
    ):
        own = {key: options.pop(key) for key in ("context", "shares") if key in options}
        spec = replace(SPEC, prompts=8, group_size=group, **own)
        smaller, fewer = coarsen_run(spec, Cluster(ranks, **SET, **options), fewest)
        yield f"{group} -> {smaller.group_size}, {len(fewer.ranks)} ranks {shown(smaller.shares)}"
        yield from of_cluster(fewer)
        if group < 100:
            found = simulate_until_steady(smaller, fewer)
            yield shown((found.step_s, found.steps, found.settled, found.seconds))


def of_halt() -> Iterator[str]:
    """The only rollout dies, and nobody does its work."""
    ranks = tuple(RANKS[:5])
    with pytest.raises(DeadlockError) as halted:
        simulate_run(SPEC, Cluster(ranks, **SET), 4, Disturbance(failures=((9.0, 4),)))
    yield str(halted.value)


def of_search(work: Workload) -> Iterator[str]:
    many = Costing(work, Hardware((replace(FAST, count=96, per_node=8), replace(SLOW, count=32))))
    for tag, first, size in ((False, None, 1), (True, "slow", 1), (False, "fast", 2)):
        base = many.make_candidate(1, 127, tag=tag, first=first, task_size=size)
        yield f"balance {_balanced_trainers(many, base)} {sorted(_around_balance(many, base))}"
        yield f"schedules {hashed(_schedule_candidates(many, base.with_changes(async_steps=1)))}"
    roles = replace(SLOW, role="rollout", count=6), replace(FAST, count=2)
    one = Costing(work, Hardware(roles))
    yield f"no half {_balanced_trainers(one, one.make_candidate(1, 7))}"
    odd = replace(work, prompts=7, group_size=24, updates=1, oversample=0, whole_batch=False)
    seven = Costing(odd, Hardware((replace(FAST, count=2),)))
    yield f"sizes {task_sizes(seven)} near {hashed(neighbour_candidates(seven, seven.make_candidate(1, 1)))}"
    nine = Costing(replace(odd, group_size=18), seven.hardware)
    yield f"sizes {task_sizes(nine)}"
    yield f"two {hashed(disaggregated_candidates(seven, 0))}"
    apart = Costing(work, Hardware((FAST, SLOW), lines={frozenset(("fast", "slow")): LINE}))
    yield f"places {shown(colocated_candidates(apart))} {hashed(disaggregated_candidates(apart, 0))}"
    some = (FAST, SLOW), (replace(SLOW, role="rollout"), FAST), (replace(FAST, count=4),)
    for pools in some if work is GUIDED else some[2:]:
        costing = Costing(work, Hardware(pools))

        def named(candidate: Candidate) -> str:
            return shown(candidate)

        alone = list(colocated_candidates(costing))
        yield f"colocated {len(alone)} {hashed(map(named, alone))}"
        for steps in (0, 1):
            apart = list(disaggregated_candidates(costing, steps))
            best = promising_candidates(costing, apart)
            yield f"apart {len(apart)} {hashed(map(named, apart))}"
            yield f"promising {len(best)} {hashed(map(named, best))}"
            yield shown(f"{c.name} {c.trainers}+{c.rollouts}" for c in best)
        for candidate in (*alone[:1], *best[:1]):
            near = list(neighbour_candidates(costing, candidate))
            yield f"near {len(near)} {hashed(map(named, near))}"


def drawn_run(draw: Drawing) -> tuple[ScheduleSpec, Cluster, Disturbance]:
    """Return a small run whose schedule, ranks and mishaps are drawn."""
    spec, trainers = draw.spec(), draw.number(1, 4)
    rollouts = draw.of([0, 1, 2, 3, 4])
    lockstep, together = (
        draw.true(0.4),
        draw.of([n for n in (0, 1, 2, 4) if not n or trainers % n == 0]),
    )
    context = draw.of([1, 2]) if trainers % 2 == 0 and together in (0, 2, 4) and lockstep else 1
    shares = tuple(draw.number(1, 3) + 0.5 for _ in range(trainers)) if draw.true(0.3) else ()
    spec = replace(
        spec,
        context=context,
        shares=() if context > 1 else shares,
        async_steps=min(spec.async_steps, rollouts),
    )
    pools = {role: (draw.seconds(2.0, 0.25), draw.times(4, 0.5)) for role in ("a", "b", "c")}
    ranks = []
    for number in range(trainers + rollouts):
        pool = "a" if number < trainers else draw.of("bc")
        step, (encode, decode, score, adopt) = pools[pool]
        cells = (draw.seconds(1.0, 0.25), draw.seconds(0.25)) if number < trainers else (0.0, 0.0)
        far = draw.times(2, 0.5) if pool == "c" else (0.0, 0.0)
        role = "trainer" if number < trainers else "rollout"
        ranks.append(
            VirtualRank(number, role, pool, step, encode, decode, score, *cells, adopt, *far)
        )
    free = dict(zip(SET, draw.times(len(SET), 0.5), strict=True))
    cluster = Cluster(
        tuple(ranks), lockstep, together if lockstep else 0, **free, useful=draw.of([1.0, 1.0, 0.5]),
        static_claims=not rollouts and draw.true(0.4),
    )  # fmt: skip
    dies = rollouts > 1 and draw.true(0.4)
    mishap = Disturbance(
        draw.of([0.0, 0.0, 0.1]), draw.number(0, 3), {draw.number(0, trainers): 1.5} if draw.true(0.3) else {},
        ((draw.seconds(30.0), trainers),) if dies else (), draw.seconds(3.0),
    )  # fmt: skip
    return spec, cluster, mishap


def of_drawn_runs() -> Iterator[str]:
    """Yield a line of seconds of each drawn run, with bounds, and with what a coarser one takes."""
    for seed in range(48):
        spec, cluster, mishap = drawn_run(Drawing(seed))
        try:
            found = simulate_run(spec, cluster, 3, mishap, trace=True)
        except DeadlockError as halted:
            yield f"{seed} {halted}"[:200]
            continue
        parts = found.made, found.trained, [vars(span) for span in found.spans], found.messages
        low = (
            *training_floor(spec, cluster),
            floor_seconds(spec, cluster),
            busiest_seconds(spec, cluster),
        )
        calm = simulate_until_steady(spec, cluster, most=8)
        coarse = simulate_until_steady(*coarsen_run(spec, cluster, 2), most=8)
        steps = found.step_s, calm.step_s, calm.steps, calm.settled, coarse.step_s
        yield f"{seed} {shown(steps)} {hashed((parts, found.seconds, low, found.step_ends))}"
        yield f"  {shown(low)} {shown({cause[1:]: s for cause, s in calm.seconds.items() if s > 1e-9})}"[
            :200
        ]


def drawn_costing(draw: Drawing) -> Costing:
    """Return a workload on pools of which some hold it and some do not."""
    work = draw.of(WORKS.values())
    updates, size = draw.number(1, 2), draw.of([2, 4, 6])
    work = replace(
        work, prompts=updates * draw.number(1, 4), group_size=size, updates=updates, oversample=0,
        trained_samples=draw.of([None, 2]), guidance=draw.true(), lora_rank=draw.of([None, 16, 64]), reference=draw.true(),
        ema=draw.true(), evaluated=draw.number(0, 4), rollouts_evaluate=draw.true(), whole_batch=draw.true(0.2),
        engine=draw.of(["eager", "compiled", "engine"]), base_bytes=draw.of([2.0, 0.5625]), storage_bytes=draw.of([2, 4]),
        trained_steps=draw.number(1, work.steps), stored_prompts=draw.true(),
    )  # fmt: skip
    fast = replace(
        FAST,
        count=draw.of([1, 2, 3, 4, 8]),
        memory_gib=draw.of([40, 80, 140]),
        per_node=draw.of([2, 4]),
    )
    slow = replace(
        SLOW,
        count=draw.number(1, 4),
        role=draw.of(["auto", "rollout"]),
        memory_gib=draw.of([48, 96]),
    )
    lines = {frozenset(("fast", "slow")): LINE} if draw.true(0.3) else {}
    judges = 1 if work.judged else 0
    pools = (replace(fast, judges=judges),) if draw.true() else (replace(fast, judges=judges), slow)
    return Costing(work, Hardware(pools, lines=lines if len(pools) > 1 else {}))


def of_drawn_searches() -> Iterator[str]:
    """Yield what a search asks about each drawn workload, and short names of what it would try."""
    for seed in range(24):
        draw = Drawing(seed)
        costing = drawn_costing(draw)
        gpus, trained = costing.hardware.gpus, costing.work.trained_steps
        yield f"{seed} {shown((step_bound(costing), task_sizes(costing)))} {gpus} GPUs"
        for trainers in {1, draw.number(1, gpus), gpus}:
            held = costing.make_candidate(
                trainers, gpus - trainers, sharding=draw.of(["ddp", "hsdp", "fsdp"]) if trainers > 1 else "ddp",
                tsp_batch=draw.number(1, trained), tag=draw.true(), task_size=draw.of(task_sizes(costing)),
                encoders=draw.true(), gap=draw.number(0, 1), async_steps=draw.number(0, 1) if trainers < gpus else 0,
            )  # fmt: skip
            if not is_allowed(costing, held):
                continue
            fits = fit_candidate(costing, held)
            yield shown(
                (held.name, trainers, bool(costing.find_misfits(held)), step_batches(costing, held))
            )
            if fits is None:
                yield f"  {find_remedy(costing, held)}"
                continue
            seconds = (
                costing.cell_seconds(fits),
                costing.step_floor(fits),
                bound_of_roles(costing, fits),
            )
            gib = [use.gib for use in costing.rank_memory(fits).values()]
            yield f"  {shown((fits.spec.tsp_batch, fits.encoders, *seconds, gib))}"
            near = [shown(each) for each in neighbour_candidates(costing, fits)]
            yield f"  near {len(near)} {hashed(near)} {shown(costing.host_gib(fits))}"
        if gpus < 7:
            tried = [
                *colocated_candidates(costing),
                *disaggregated_candidates(costing, draw.number(0, 1)),
            ]
            best = [
                f"{each.name} {each.trainers}+{each.rollouts}"
                for each in promising_candidates(costing, tried)
            ]
            yield f"  tried {len(tried)} {hashed(map(shown, tried))} {shown(best)}"


SMALL = replace(FLUX, prompts=2, group_size=4, trained_steps=2, updates=1)
TWO = (replace(FAST, count=2), replace(SLOW, count=1, judges=1))


def of_plan() -> Iterator[str]:
    work = replace(SMALL, judged=("vlm_judge",))
    plan = make_plan(Costing(work, Hardware(TWO)))
    booking = Booking(40, 2.5, 3, Drawn(5, 4, 12, 2))
    asked = simulate_candidate(
        plan.costing, plan.costing.make_candidate(1, 2), plan.bound_s, exact=True
    )
    for asynchronous in (False, True):
        yield from booking_lines(plan, asynchronous, booking)
        yield from explain_winner(plan, asynchronous)
        yield from candidate_table(plan, asynchronous, booking, 4, asked)
    written = as_json(plan, asked, "", True, booking)
    best = {kind: row and row["overrides"] for kind, row in written.pop("best").items()}
    yield f"best {shown(best)}"
    yield shown({key: value for key, value in written.items() if key != "candidates"})
    yield from map(shown, written["candidates"])
    alone = sync_run(plan.costing, 3)
    yield shown((alone.step_s, alone.candidate.trainers, alone.candidate.sharding))
    fixed = make_plan(plan.costing, 3, {"trainers": 1, "rollouts": 2, "tag": True}, False)
    yield shown((o.candidate.name, o.step_s, o.candidate.spec.task_size) for o in fixed.outcomes)
    base = plan.costing.make_candidate(1, 2)
    for choices in ({"task_size": 2}, {"task_size": 2, "tsp_batch": 1}):
        yield shown(_apply_choices(plan.costing, [base], choices))
    small = replace(SLOW, memory_gib=8, count=2)
    for pools in ((small,), (replace(small, count=1),), (replace(SLOW, role="rollout"),)):
        with pytest.raises(PlanError) as refused:
            make_plan(Costing(work, Hardware(pools)))
        yield str(refused.value)


def of_outcomes(work: Workload) -> Iterator[str]:
    """Yield what separates the steps of a few candidates from the bound."""
    lines = {frozenset(("fast", "slow")): LINE}
    one = Costing(work, Hardware((replace(FAST, count=8),)))
    two = Costing(replace(work, prompts=4), Hardware((FAST, SLOW), lines=lines))
    many = Costing(work, Hardware((replace(FAST, count=24),)))
    for costing, trainers, rollouts, choices in (
        (one, 8, 0, {"sharding": "fsdp", "tsp_batch": 2, "gap": 0}),
        (one, 2, 6, {"tag": True, "encoders": True}),
        (one, 4, 4, {"sharding": "fsdp", "context": 2, "task_size": 2, "async_steps": 1}),
        (two, 4, 4, {"first": "fast", "sharding": "hsdp", "async_steps": 1, "stale_fraction": 1.0}),
        (many, 12, 12, {}),
    )[: 5 if work is FLUX else 4]:
        held = costing.make_candidate(trainers, rollouts, **choices)
        if not is_allowed(costing, held):
            continue
        for exact in (True, False):
            found = simulate_candidate(costing, held, step_bound(costing), exact)
            yield f"{held.name} {shown((found.step_s, found.quick_s, found.coarse, found.settled))}"
            waits = {cause: part for cause, part in found.bubble.items() if part > 1e-9}
            yield shown((found.expected_s, found.efficiency, waits))
            if exact:
                robust = found.robust_s, found.slower_generation_s
                yield shown((found.jitter_s, found.slow_rank_s, *robust))
                yield shown(f"{each['cause']} {each['seconds']:.6g}" for each in found.limits)
            yield shown(found.evaluation_s(Drawn(*n)) for n in ((5, 4, 12, 2), (90, 8, 40)))
            yield shown(
                (hashed(found.result.made), hashed(found.result.trained), len(found.result.spans))
            )
        yield shown(found.simulated_seconds(steps=steps) for steps in (None, 2))


FOUR = replace(FAST, count=4)
PLANS: dict[str, tuple[Costing, dict[str, Any]]] = {
    "unequal": (
        Costing(replace(FLUX, prompts=4, group_size=4, updates=1), Hardware((replace(FAST, count=3), replace(SLOW, count=3)))),
        {},
    ),
    "on-policy": (Costing(replace(FLUX, prompts=4), Hardware((FOUR,))), {"asynchronous": False}),
    "judged": (Costing(replace(GUIDED, prompts=4, oversample=0), Hardware((replace(FOUR, judges=1),))), {"steps": 2}),
    "colocated": (
        Costing(replace(VIDEO, group_size=4, prompts=2, lora_rank=16), Hardware((FOUR,))),
        {"fixed": {"trainers": 4, "rollouts": 0}},
    ),
    "far": (
        Costing(SMALL := replace(FLUX, prompts=2, group_size=4, trained_steps=2, updates=1),
                Hardware((replace(FAST, count=2), replace(SLOW, count=2)), lines={frozenset(("fast", "slow")): LINE})),
        {"fixed": {"async_steps": 1, "stale_fraction": 0.5}},
    ),
    "roles": (
        Costing(SMALL, Hardware((replace(FAST, count=2, role="trainer"), replace(SLOW, count=2, role="rollout")))),
        {"fixed": {"tag": True}, "asynchronous": False},
    ),
    "few": (Costing(replace(WAN, prompts=1, group_size=2, trained_steps=2), Hardware((FOUR,))), {}),
}  # fmt: skip


def of_plans(costing: Costing, options: dict[str, Any]) -> Iterator[str]:
    plan = make_plan(costing, **options)
    yield shown((plan.bound_s, plan.simulated, len(plan.outcomes)))
    for outcome in plan.outcomes:
        yield f"{outcome.candidate.name} {shown(outcome.candidate)}"
        yield shown(
            (outcome.step_s, outcome.expected_s, outcome.quick_s, outcome.coarse, outcome.settled)
        )
    yield shown(
        [
            each and each.candidate.name
            for each in map(plan.best_of_kind, ("colocated", "on_policy", "async"))
        ]
    )
    booking = Booking(40, None, 2, Drawn(5, 4, 12))
    for asynchronous in (False, True)[: 1 + options.get("asynchronous", True)]:
        if eligible_outcomes(plan, asynchronous):
            yield from (
                *explain_winner(plan, asynchronous),
                *booking_lines(plan, asynchronous, booking)[:2],
            )
            yield from candidate_table(plan, asynchronous, booking, 2)[1:]
    for count in {2, costing.hardware.gpus}:
        alone = sync_run(costing, count)
        yield shown(alone and (alone.step_s, alone.candidate))


def of_assumptions() -> Iterator[str]:
    """Yield every constant of the planner's modules, and every value that a caller may leave out."""
    for path in sorted(Path(planner.__path__[0]).glob("*.py")):
        module = importlib.import_module(f"{planner.__name__}.{path.stem}")
        yield path.stem
        for name, value in vars(module).items():
            if name.strip("_").isupper() and " at 0x" not in repr(value):
                yield f"  {name} {shown(value)}"
            own = getattr(value, "__module__", "") == module.__name__ and callable(value)
            record = is_typeddict(value)
            if not own or record or (inspect.isclass(value) and issubclass(value, Exception)):
                continue
            methods = [each for each in vars(value).values() if inspect.isfunction(each)]
            for function in [value, *methods] if inspect.isclass(value) else [value]:
                asked = inspect.signature(function).parameters.values()
                known = {p.name: p.default for p in asked if p.default is not p.empty}
                plain = {name: v for name, v in known.items() if not callable(v) and v != ()}
                if plain and "__" not in function.__name__:
                    yield f"  {function.__name__} {shown(plain)}"


ROWS = [
    {"samples": 1, "seconds": 0.25}, {"samples": 4, "seconds": 0.5, "passes": 1}, {"samples": 8, "seconds": 9.0, "tokens": 7},
    {"samples": 8, "seconds": 9.0, "engine": "compiled"},
]  # fmt: skip
TRAINED = [
    {"samples": 4, "steps": 2, "seconds": 3.0, "keeps": "inputs"}, {"samples": 2, "steps": 3, "seconds": 8.0},
    {"samples": 9, "steps": 9, "seconds": 8.0, "trained": "all"}, {"samples": 9, "steps": 9, "seconds": 8.0, "reference": True},
]  # fmt: skip
MEASURED = {
    "h100_80gb_hbm3": {"flux1_dev": {"generate": ROWS, "train": TRAINED, "decode": ROWS, "encode": []}},
    "h100_pcie": {"flux1_dev": {"encode": ROWS}},
    "l40s": {"flux1_dev": {"encode": ROWS[:1], "score": ROWS[2:]}, "wan21_14b": {"decode": ROWS}},
}  # fmt: skip


def of_measured() -> Iterator[str]:
    """Yield two pools with what was measured on their GPUs, and with what is written in a profile."""
    with tempfile.TemporaryDirectory() as folder:
        for name, models in MEASURED.items():
            Path(folder, f"{name}.yaml").write_text(yaml.safe_dump({"models": models}))
        for seconds in (
            {},
            {"encode": {"slow": 0.125}, "decode": {"slow": 0.5}, "train": {"fast": 2.0}},
        ):
            found = with_measured(Hardware((FAST, SLOW), seconds), FLUX, Path(folder))
            yield from (f"{pool.name} {shown(pool.efficiency)}" for pool in found.pools)
            yield shown(found.seconds)
    own = costs.Costs(FLUX, Hardware((FAST, SLOW)))
    for stage, keeps in (("generate", None), ("train", None), ("train", "inputs")):
        yield shown(computed_seconds(own, FAST, stage, 4, steps, keeps) for steps in (1, 2))


def of_command(words: tuple[str, ...]) -> Iterator[str]:
    """Yield what `digenrl plan` prints, and short names of what it writes."""
    out, err = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        with redirect_stdout(out), redirect_stderr(err):
            code = plan_command.main([*words, f"output_root={folder}"])
        yield f"exit {code}"
        for path in sorted(Path(folder).rglob("*.json")):
            text = path.read_text(encoding="utf-8")
            told = json.loads(text, parse_float=lambda digits: f"{float(digits):.6g}")
            yield f"{path.name} {hashed(told)}"
    for text in (out.getvalue(), err.getvalue()):
        whole = text.replace(" \\\n    ", " ")  # a command is folded by the length of the path
        told = [line for line in whole.splitlines() if folder not in line]
        yield from (f"  {line}" for line in told if line and len(told) < 50)
        yield f"{len(told)} lines, {text.count(folder)} paths"


COMMANDS: dict[str, tuple[str, ...]] = {
    "idle": (
        "plan.simulated_steps=4", "plan.plot=false", "plan.price_per_gpu_hour=2", "allocation.trainers=1",
        "allocation.rollouts=2", "max_rl_steps=7", "plan.async=true",
    ),
    "auto": ("plan.show=1", "plan.plot=false", "schedule.auto=true", "allocation.trainers=auto", "plan.simulated_steps=4"),
    "refused": (
        "plan.plot=false", "hardware.pools.h100.memory_gib=34", "allocation.trainers=2", "allocation.rollouts=2",
        "plan.simulated_steps=4", "model.gradient_checkpointing=false",
    ),
    "nothing": ("hardware.pools.h100.memory_gib=8",),
    "machine": ("--json", "plan.plot=false", "plan.simulated_steps=4"),
}  # fmt: skip


SHORT = (
    "experiment=flux1_flowgrpo", "hardware=node_8xh100", "hardware.pools.h100.count=4",
    "schedule=sync", "model.gradient_checkpointing=auto", "data.prompts_per_batch=8",
    "data.group_size=8",
)  # fmt: skip
READ: dict[str, tuple[str, ...]] = {
    # Two replicas have to compute activations again, and two shards would be faster; but a run
    # takes the first way to shard that fits.
    "tight": (*SHORT, "hardware.pools.h100.memory_gib=45"),
    "scant": (*SHORT, "hardware.pools.h100.memory_gib=40"),
    "pools": (
        "experiment=wan21_dancegrpo", "hardware=testbed_ac", "sampling.task_size=auto",
        "schedule.auto=false", "schedule.tsp.batch=auto", "parallel.sharding=auto",
        "allocation.evaluation=rollouts", "callbacks.evaluation.every=3", "max_rl_steps=10",
        "schedule.async_steps=1", "schedule.gap=1", "algorithm.kl_weight=0.1", "data.oversample=2",
    ),
    "edits": (
        "experiment=qwen_image_edit_flowgrpo", "hardware=h20x16", "schedule.auto=false",
        "sampling.storage_dtype=float32", "allocation.trainers=12", "parallel.sharding=hsdp",
        "parallel.shard_group=4", "model.gradient_checkpointing={inputs:0.5}", "schedule.tag=true",
        "model.compile=true", "algorithm.ema=null",
        "callbacks.evaluation.samples_per_prompt=3", "sampling.eval.batch=6",
    ),
    "halves": (
        "experiment=wan21_videoalign", "hardware=h20x16", "data.prompts_per_batch=2",
        "allocation.trainers=2", "algorithm.advantage.best_and_worst=3", "model.offload_encoders=false",
        "data.group_size=8",
    ),
    "pretended": (*SHORT, "hardware.emulate=true", "hardware.pools.h100.memory_gib=20"),
    "tokens": (*SHORT, "model.true_cfg_scale=1.5", "parallel.context=2", "hardware.pools.h100.count=3"),
    "judged": (
        "experiment=sd35_nft", "hardware=single_24gb", "hardware.emulate=true",
        "~callbacks.evaluation", "hardware.time_scale=0.5", "allocation.rollouts=0",
        "model.quantize=nf4",
    ),
}  # fmt: skip


def of_reading(words: tuple[str, ...]) -> Iterator[str]:
    composed = configuration.load([*words, "data.prompt_store=null"], "plan")
    asking = PlannerAdvisor()
    yield shown(asking.task_size(composed, sizes) for sizes in ((1, 2, 3, 4, 6, 8), (1, 6)))
    composed = with_task_size(composed, PlannerAdvisor())
    config, costing = composed.settings, costing_of(composed)
    yield from (shown(vars(pool)) for pool in costing.hardware.pools)
    yield f"{shown(costing.work)} {shown(vars(booking_of(config)))}"
    yield shown(fixed_choices(composed, costing))
    gpus = costing.hardware.gpus
    for trainers in {gpus, -(-gpus * 3 // 4)}:
        candidate = candidate_of(config, trainers, gpus - trainers, costing.work.trained_steps)
        yield f"{trainers}+{gpus - trainers} {shown(candidate)}"
        advice = asking.advise_ranks(composed, trainers, gpus - trainers)
        alike = Counter((stage, shown(s)) for (stage, _), s in advice.expected.items())
        yield f"{shown(alike)} {shown(advice.planned)}"
        yield from dict.fromkeys(shown(vars(each)) for each in advice.stand_ins)
        yield from asking.memory_lines(composed, trainers, gpus - trainers)
        try:
            yield shown(
                asking.place_model(composed, trainers, gpus - trainers, ModelPlacement("", 0, 0))
            )
        except ValueError as refused:
            yield str(refused)
    for processes in {1, 2, min(4, gpus)}:
        found = planned_split(composed, processes)
        yield f"split {shown(found and (found.candidate, found.step_s, found.bound_s))}"
    made = asking.choose_schedule(composed, min(4, gpus)) if found else composed
    yield f"{made.notes[len(composed.notes) :]} {shown(made.planned)}"
    yield shown(dict(made.settings.allocation))


SECTIONS: dict[str, Callable[[], Iterator[str]]] = {
    "gpus": of_gpus,
    **{f"work {name}": partial(of_work, work) for name, work in WORKS.items()},
    **{f"costs {name}": partial(of_costs, work) for name, work in WORKS.items()},
    **{f"costing {name}": partial(of_costing, work) for name, work in WORKS.items()},
    **{f"run {name}": partial(of_run, *run) for name, run in RUNS.items()},
    "coarse": of_coarse,
    "drawn runs": of_drawn_runs,
    "drawn searches": of_drawn_searches,
    "halt": of_halt,
    **{f"search {name}": partial(of_search, work) for name, work in WORKS.items()},
    "plan": of_plan,
    "assumptions": of_assumptions,
    "measured": of_measured,
    **{f"command {name}": partial(of_command, (*SHORT, *more)) for name, more in COMMANDS.items()},
    **{f"outcomes {name}": partial(of_outcomes, WORKS[name]) for name in ("flux", "guided")},
    **{f"plans {name}": partial(of_plans, *made) for name, made in PLANS.items()},
    **{f"read {name}": partial(of_reading, words) for name, words in READ.items()},
}


@pytest.mark.parametrize("section", SECTIONS)
def test_figures_are_those_of_before(section: str) -> None:
    stored = STORED.read_text(encoding="utf-8").split("\n\n")
    known = {title: lines for title, *lines in (part.strip().split("\n") for part in stored)}
    assert list(SECTIONS[section]()) == known[section]


@pytest.mark.parametrize("name", ["plain", "stale", "far", "split"])
def test_what_ranks_do_and_wait_for_fills_the_measured_steps(name: str) -> None:
    """Tasks that are in progress at the end count up to it."""
    spec, cluster, _ = RUNS[name]
    found = simulate_until_steady(spec, cluster)
    spent = Counter[str]()
    for (pool, _, _), seconds in found.seconds.items():
        spent[pool] += seconds  # type: ignore[assignment]
    for pool, ranks in Counter(rank.pool for rank in cluster.ranks).items():
        assert spent[pool] == pytest.approx(ranks * found.steps * found.step_s)


@pytest.mark.parametrize(("name", "first"), [("plain", 1), ("stale", 3)])
def test_a_run_that_never_settles_is_measured_behind_its_first_steps(name: str, first: int) -> None:
    spec, cluster, _ = RUNS[name]
    spec = replace(spec, tag=False)
    found = simulate_until_steady(spec, cluster, most=9, disturbance=Disturbance(jitter=0.5))
    assert (len(found.step_ends), found.first, found.settled) == (9, first, True)


if __name__ == "__main__":
    STORED.write_text("\n\n".join("\n".join([n, *make()]) for n, make in SECTIONS.items()) + "\n")
