"""Every schedule computes what a single process computes: same samples, same gradients, same
weights.

With one trainer in canonical order everything is bit-equal. Several trainers take sums in another
order, so gradients and weights agree to rounding. Samples are then bit-equal only in the first RL
step, as the weights are. FSDP puts its own nodes into the autograd graph. This changes the order in
which an activation with several consumers collects its gradient. With all weights trained, that is
rounding too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from digenrl import run
from digenrl.cluster.world import World
from digenrl.config.settings import Settings
from digenrl.schedule.scheduler import Scheduler
from tests.strategy.processes import (
    FP64,
    FULL,
    SGD,
    Job,
    Record,
    assert_same_cells,
    completed,
    configured,
    relative,
    run_cluster,
    run_series,
)
from tests.strategy.reference import reference

pytestmark = pytest.mark.processes

_REFERENCES: dict[tuple[str, ...], Record] = {}


def reference_of(config: Settings, block_steps: int = 1) -> Record:
    """The reference of a configuration; schedules share it."""
    keys = ("model", "algorithm", "sampling", "data", "max_rl_steps", "seed")
    asynchrony = (
        config.schedule.async_steps,
        config.schedule.stale_fraction if config.schedule.async_steps else 0.0,
    )
    identity = (*(str(config.node_at(key)) for key in keys), str(asynchrony), str(block_steps))
    if identity not in _REFERENCES:
        _REFERENCES[identity] = reference(config, block_steps)
    return _REFERENCES[identity]


def assert_equal_runs(
    found: Record, wanted: Record, exact: bool, double: bool, weight_bound: float | None
) -> None:
    """Gradients at each optimizer step, samples, weights; `exact`: bit-equal weights and samples of
    all steps."""
    bound = 1e-12 if double else 1e-5
    assert len(found.gradients) == len(wanted.gradients)
    for update, (mine, theirs) in enumerate(zip(found.gradients, wanted.gradients, strict=True)):
        assert relative(mine, theirs) <= bound, f"gradient of update {update}"
    assert_same_cells(found, wanted, steps=None if exact else [0])
    for key, cell in wanted.cells.items():
        mine = found.cells[key]
        assert len(found.trained_by[key]) == 1, key
        assert mine.version == cell.version, key
        torch.testing.assert_close(
            mine.latents, cell.latents, rtol=0, atol=1e-9 if double else 1e-3
        )
    if exact:
        assert all(
            torch.equal(found.weights[name], tensor) for name, tensor in wanted.weights.items()
        )
    elif weight_bound is not None:
        assert relative(found.weights, wanted.weights) <= weight_bound
    assert len(set(found.micro_batches.values())) == 1, (
        "trainers ran different numbers of micro-batches"
    )


@pytest.mark.parametrize(
    ("trainers", "rollouts", "double"),
    [
        pytest.param(1, 1, False, id="1+1-fp32", marks=pytest.mark.slow),
        pytest.param(1, 1, True, id="1+1-fp64", marks=pytest.mark.slow),
        pytest.param(2, 1, False, id="2+1-fp32", marks=pytest.mark.slow),
        pytest.param(2, 1, True, id="2+1-fp64", marks=pytest.mark.slow),
        pytest.param(2, 2, False, id="2+2-fp32", marks=pytest.mark.slow),
        pytest.param(2, 2, True, id="2+2-fp64", marks=pytest.mark.slow),
        pytest.param(1, 0, False, id="colocated-1-fp32", marks=pytest.mark.slow),
        pytest.param(1, 0, True, id="colocated-1-fp64", marks=pytest.mark.slow),
        pytest.param(2, 0, False, id="colocated-2-fp32", marks=pytest.mark.slow),
        pytest.param(2, 0, True, id="colocated-2-fp64", marks=pytest.mark.slow),
    ],
)
def test_schedule_equals_the_single_process_loop_over_five_steps(
    tmp_path: Path, trainers: int, rollouts: int, double: bool
) -> None:
    """The whole LoRA of the experiment, KL to the base model, gradient clipping, AdamW."""
    # Adam divides by the gradient's own size, so it magnifies rounding; a larger epsilon leaves it
    # its memory.
    words = [
        "schedule=sync" if rollouts else "schedule=colocated",
        "schedule.tsp.batch=1",
        "max_rl_steps=5",
    ]
    words += [
        "algorithm.optimizer.eps=1e-3",
        "algorithm.max_grad_norm=1.0",
        *(FP64 if double else ()),
    ]
    config = configured(*words)
    cluster = run_cluster(tmp_path, trainers, rollouts, config)
    assert_equal_runs(
        completed(cluster), reference_of(config), trainers == 1, double, weight_bound=None
    )
    assert [row.get("predicted_step_s", 0.0) > 0.0 for row in cluster.metrics()] == [
        False,
        *[True] * 4,
    ], "a step is predicted as soon as one has been measured"


LIGHT = (
    *SGD,
    "algorithm.kl_weight=0",
    r"model.lora.targets=[attn\.to_q,proj_out]",
    "max_rl_steps=2",
)
"""Two updates of a small LoRA: the matrix is about schedules."""


@pytest.mark.slow
def test_colocated_ranks_generate_all_groups_before_the_first_of_two_updates(
    tmp_path: Path,
) -> None:
    """After the first optimizer step nobody holds the published version any more, so nothing may be
    left to make. The fast witness with one rank: test_alone."""
    config = configured(
        *LIGHT,
        "schedule=colocated",
        "schedule.gap=1",
        "schedule.tsp.batch=1",
        "algorithm.updates_per_batch=2",
    )
    found = completed(run_cluster(tmp_path, 2, 0, config))
    assert_equal_runs(found, reference_of(config), exact=False, double=False, weight_bound=1e-6)


FACTORS: dict[str, tuple[str, ...]] = {
    "gap": ("0", "1"),
    "tsp": ("off", "batch", "shard", "both"),
    "tag": ("false", "true"),
    "ranks": ("1+1", "2+2", "1+3"),
    "sharding": ("ddp", "fsdp"),
    "tune": ("lora", "full"),
    "updates": ("1", "2"),
    "dtype": ("fp32", "fp64"),
}
Case = Mapping[str, str]


def product() -> Iterator[Case]:
    """Every combination; the dtype alternates with every factor instead of doubling the number of
    cases."""
    factors = {name: values for name, values in FACTORS.items() if name != "dtype"}
    for choice in itertools.product(*(enumerate(values) for values in factors.values())):
        case = {name: value for name, (_, value) in zip(factors, choice, strict=True)}
        yield case | {"dtype": FACTORS["dtype"][sum(position for position, _ in choice) % 2]}


def pairwise() -> list[Case]:
    """Cases in which every pair of values of two factors occurs: greedy, deterministic."""
    names = list(FACTORS)
    candidates = [
        dict(zip(names, values, strict=True)) for values in itertools.product(*FACTORS.values())
    ]
    open_pairs = set().union(*(_pairs(case) for case in candidates))
    chosen: list[Case] = []
    while open_pairs:
        best = max(candidates, key=lambda case: len(_pairs(case) & open_pairs))
        open_pairs -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(case: Case) -> frozenset[tuple[tuple[str, str], tuple[str, str]]]:
    return frozenset(itertools.combinations(case.items(), 2))


def ids(cases: Iterable[Case]) -> list[str]:
    return ["-".join(f"{name}={value}" for name, value in case.items()) for case in cases]


def words_of(case: Case) -> list[str]:
    """A case as overrides of the tiny configuration."""
    return [
        *LIGHT,
        f"schedule.gap={case['gap']}",
        f"schedule.tsp.batch={2 if case['tsp'] in ('batch', 'both') else 1}",
        f"schedule.tsp.shard={str(case['tsp'] in ('shard', 'both')).lower()}",
        f"schedule.tag={case['tag']}",
        f"parallel.sharding={case['sharding']}",
        f"algorithm.updates_per_batch={case['updates']}",
        *(FULL if case["tune"] == "full" else ()),
        *(FP64 if case["dtype"] == "fp64" else ()),
    ]


def check(cases: Sequence[Case], run_dir: Path, *overrides: str) -> None:
    """Run cases of one rank layout and compare each with its reference; every failure is told."""
    (layout,) = {case["ranks"] for case in cases}
    trainers, rollouts = (int(count) for count in layout.split("+"))
    by_name = dict(zip(ids(cases), cases, strict=True))
    jobs = [
        Job(
            name,
            configured(*words_of(case), *overrides),
            lend_always if case["tag"] == "true" else None,
        )
        for name, case in by_name.items()
    ]
    failures, lent = [], 0
    for job, cluster in run_series(run_dir, trainers, rollouts, jobs):
        case = by_name[job.name]
        double, block = case["dtype"] == "fp64", 2 if case["tsp"] in ("batch", "both") else 1
        exact = trainers == 1 and (case["sharding"] == "ddp" or case["tune"] == "lora")
        try:
            found = completed(cluster)
            lent += len(cluster.spans("lend"))
            bound = 1e-12 if double else 1e-6
            assert_equal_runs(
                found, reference_of(job.config, block), exact, double, weight_bound=bound
            )
        except AssertionError as error:
            failures.append(f"{job.name}: {error}")
    assert not failures, "\n".join(
        [f"{len(failures)} of {len(jobs)} cases differ from their reference:", *failures]
    )
    assert lent or not any(case["tag"] == "true" for case in cases), (
        "no trainer ever lent: TAG was not tried"
    )


def lend_always(rank: run.Rank, world: World) -> None:
    """The search finds nothing to gain in runs of milliseconds; equality must hold whatever it
    decides."""
    rank.strategy.on_bubble = lambda board, pending: 1  # type: ignore[method-assign]
    Scheduler.opens = lambda *args: min(3, args[4][1])  # type: ignore[method-assign, assignment]


PAIRWISE = pairwise()


def test_the_cover_holds_every_pair() -> None:
    covered = set().union(*(_pairs(case) for case in PAIRWISE))
    for (a, values_a), (b, values_b) in itertools.combinations(FACTORS.items(), 2):
        assert {((a, x), (b, y)) for x in values_a for y in values_b} <= covered


def having(cases: Iterable[Case], **values: str) -> list[Case]:
    """The cases with these values."""
    return [case for case in cases if values.items() <= case.items()]


@pytest.mark.parametrize(
    "ranks",
    [
        "2+2",
        *(
            pytest.param(ranks, marks=pytest.mark.slow)
            for ranks in FACTORS["ranks"]
            if ranks != "2+2"
        ),
    ],
)
def test_equality_matrix(tmp_path: Path, ranks: str) -> None:
    check(having(PAIRWISE, ranks=ranks), tmp_path)


WITHIN = (*LIGHT, *FP64, "data.updates_split=samples", "data.prompts_per_batch=3", "max_rl_steps=3")
TWO, THREE = (
    ("algorithm.updates_per_batch=2",),
    ("algorithm.updates_per_batch=3", "data.group_size=6"),
)
SHARED: dict[str, tuple[str, ...]] = {
    "sync": (*TWO, "schedule=sync"),
    "gap": (*TWO, "schedule.gap=1"),
    "full": (*THREE, "schedule=full", "schedule.gap=2", "schedule.async_steps=0"),
    "async": (*THREE, "schedule=full"),
    "drop": (*TWO, "schedule.gap=1", "data.oversample=1", "data.zero_variance_groups=drop"),
    "fsdp": (*TWO, "schedule=gap_tsp", "parallel.sharding=fsdp"),
}
"""Schedules in which every update takes samples of every group."""
ALONE = {
    "together": (*TWO, "schedule=colocated"),
    "together-gap": (*THREE, "schedule=colocated", "schedule.gap=1"),
}
HALF = (
    "allow_targets=[tests]",
    "reward.rewards.judge_a.scorer._target_=tests.strategy.faults.HalfIndifferent",
)


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        ("2+1", ("async",)),
        pytest.param("2+2", tuple(SHARED), marks=pytest.mark.slow),
        pytest.param(
            "1+2", tuple(name for name in SHARED if name != "fsdp"), marks=pytest.mark.slow
        ),
        pytest.param("1+0", tuple(ALONE), marks=pytest.mark.slow),
        pytest.param("2+0", tuple(ALONE), marks=pytest.mark.slow),
    ],
)
def test_updates_that_share_the_samples_of_every_group(
    tmp_path: Path, ranks: str, names: tuple[str, ...]
) -> None:
    trainers, rollouts = (int(count) for count in ranks.split("+"))
    jobs = []
    for name in names:
        config = configured(*WITHIN, *(SHARED | ALONE)[name], *(HALF if name == "drop" else ()))
        jobs.append(Job(name, config, lend_always if config.schedule.tag else None))
    lent = 0
    for job, cluster in run_series(tmp_path, trainers, rollouts, jobs):
        found, block = completed(cluster), job.config.schedule.tsp.batch
        wanted = reference_of(
            job.config, job.config.sampling.steps - 1 if isinstance(block, str) else block
        )
        lent += len(cluster.spans("lend"))
        if not job.config.data.oversample:
            assert_equal_runs(found, wanted, trainers == 1, double=True, weight_bound=1e-12)
            continue
        assert len(found.trained_by) < len(wanted.cells), "groups that teach nothing are left out"
        assert len(found.gradients) == len(wanted.gradients)
        for mine, theirs in zip(found.gradients, wanted.gradients, strict=True):
            assert relative(mine, theirs) <= 1e-12, job.name
        assert relative(found.weights, wanted.weights) <= 1e-12, job.name
    assert lent or not rollouts, "no trainer ever lent"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tune", FACTORS["tune"])
@pytest.mark.parametrize("sharding", FACTORS["sharding"])
@pytest.mark.parametrize("ranks", FACTORS["ranks"])
def test_equality_matrix_in_full(tmp_path: Path, ranks: str, sharding: str, tune: str) -> None:
    check(
        having(product(), ranks=ranks, sharding=sharding, tune=tune),
        tmp_path,
        "sampling.task_size=4",
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", FACTORS["ranks"])
def test_equality_matrix_under_one_step_asynchrony(tmp_path: Path, ranks: str) -> None:
    """Every pair of factors against a reference that uses version s-1 for the groups that the rule
    names."""
    check(having(PAIRWISE, ranks=ranks), tmp_path, "schedule.async_steps=1", "max_rl_steps=3")


@pytest.mark.slow  # by default I7's run, and the one whose updates share samples
@pytest.mark.parametrize(
    ("trainers", "rollouts", "words"),
    [
        (1, 1, ("schedule.gap=1",)),
        (2, 2, ("schedule.gap=1", "schedule.tsp.shard=true", "schedule.tag=true")),
        (
            1,
            3,
            ("schedule.gap=0", "schedule.stale_fraction=0.3", "algorithm.updates_per_batch=2"),
        ),
    ],
    ids=["1+1", "2+2-everything", "1+3-two-updates"],
)
def test_one_step_asynchrony_equals_its_reference(
    tmp_path: Path, trainers: int, rollouts: int, words: tuple[str, ...]
) -> None:
    """The stale head of each batch uses version s-1, always; the reference is told by the same pure
    rule."""
    config = configured(*LIGHT, *FP64, "schedule.async_steps=1", "max_rl_steps=3", *words)
    found = completed(run_cluster(tmp_path, trainers, rollouts, config))
    wanted = reference_of(config)
    stale = {(key[0], key[1]) for key, cell in wanted.cells.items() if cell.version == key[0] - 1}
    assert {group for _, group in stale} == {0, 1}, "ceil(0.3 x 4) = ceil(0.5 x 4) = 2 groups"
    assert_equal_runs(found, wanted, trainers == 1, double=True, weight_bound=1e-12)
