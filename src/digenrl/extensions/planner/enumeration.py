"""Which candidates are worth a simulation: by who does what, how the model is held, the task size,
and neighbours."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

from digenrl.extensions.planner.bound import seconds_per_unit, step_bound, work_units
from digenrl.extensions.planner.candidate import Candidate
from digenrl.extensions.planner.costing import Costing, gradient_refusal, only_replicas

PROMISING = (1, 2)
"""Disaggregated candidates to simulate of each kind, the lowest floors first: (on-policy,
asynchronous)."""
ROUNDING = 16
"""Blocks of an update per trainer below which splits without odd blocks are tried too."""


def context_sizes(costing: Costing, candidate: Candidate) -> list[int]:
    """Return the values of `parallel.context` above 1 that the trainers, their nodes and the model
    allow."""
    work, per_node = costing.work, (pool.per_node for pool in costing.hardware.pools)
    common = math.gcd(candidate.trainers, work.tokens, work.heads, *per_node)
    return [n for n in range(2, common + 1) if common % n == 0 and not candidate.shares]


def colocated_candidates(costing: Costing) -> Iterator[Candidate]:
    if (
        any(pool.role == "rollout" for pool in costing.hardware.pools)
        or len(costing.hardware.places) > 1
    ):
        return
    for size in task_sizes(costing):
        for split in (
            (False, True) if not _has_unequal_pools(costing) else (False,)
        ):  # an equal split repeats less encoding
            base = costing.make_candidate(
                costing.hardware.gpus,
                0,
                task_size=size,
                gap=0,
                shares=_has_unequal_pools(costing),
                static_claims=split,
            )
            yield from _sharding_candidates(costing, base)


def disaggregated_candidates(
    costing: Costing, async_steps: int, numbers: set[int] | None = None
) -> Iterator[Candidate]:
    """Yield candidates of each schedule, with numbers of trainers around the balance or with the
    given `numbers`."""
    gpus = costing.hardware.gpus
    if gpus < 2:
        return
    flexible = all(pool.role == "auto" for pool in costing.hardware.pools)
    firsts = (
        [pool.name for pool in costing.hardware.pools]
        if flexible and len(costing.hardware.pools) > 1
        else [None]
    )
    for first in firsts:
        typical = costing.make_candidate(
            1, gpus - 1, first=first, async_steps=async_steps, shares=_has_unequal_pools(costing)
        )
        if not typical.spec.gap:  # only a whole stale batch overlaps with training
            typical = typical.with_changes(stale_fraction=1.0)
        stale = (0.5, 1.0) if async_steps and typical.spec.gap else (typical.spec.stale_fraction,)
        splits = (
            (base, numbers or _around_balance(costing, base))
            for base in _schedule_candidates(costing, typical)
        )
        fitting = [near for split in splits for near in _split_candidates(costing, *split)]
        yield from (
            candidate.with_changes(stale_fraction=part) for candidate in fitting for part in stale
        )
        if not fitting:  # memory decides, not the balance
            every = {max(1, gpus * eighth // 8) for eighth in range(1, 8)}
            yield from _split_candidates(
                costing, typical.with_changes(task_size=task_sizes(costing)[0]), numbers or every
            )


def _schedule_candidates(costing: Costing, typical: Candidate) -> Iterator[Candidate]:
    """Yield `typical` with every task size, with lending and without.

    Asynchronous steps overlap, so their fragments may also be half of the batch (within one
    update). Half a batch splits more evenly, and the other half still overlaps. Where tasks are
    few, each is a single sample, and only the whole update gives every trainer a block.
    """
    update, few = costing.work.spec.groups_per_update, _few_tasks(costing)
    long = update if few else min(update, max(1, costing.work.prompts // 2))
    gaps = (
        {typical.spec.gap, long}
        if typical.spec.gap and (few or typical.spec.async_steps)
        else {typical.spec.gap}
    )
    sizes = task_sizes(costing)[: 1 if few else None]
    for size, gap, tag in itertools.product(sizes, gaps, (False, True)):
        yield typical.with_changes(task_size=size, gap=gap, tag=tag)


def _split_candidates(costing: Costing, base: Candidate, numbers: set[int]) -> Iterator[Candidate]:
    """Yield `base` with each number of trainers, in the ways that the profile's roles and memory
    allow."""
    for trainers in sorted(numbers):
        trial = base.with_changes(trainers=trainers, rollouts=costing.hardware.gpus - trainers)
        if not is_allowed(costing, trial):
            continue
        held = list(_sharding_candidates(costing, trial))
        yield from held or _sharding_candidates(costing, trial.with_changes(tag=False))


def _around_balance(costing: Costing, base: Candidate) -> set[int]:
    """Return numbers of trainers to try: around the balance of generation and training, and whole
    pools."""
    gpus, balance = costing.hardware.gpus, _balanced_trainers(costing, base)
    # What lending trainers generate, rollout ranks need not.
    offsets = (
        (-0.03, 0.0, 0.03, 0.06, 0.09, 0.12) if base.spec.tag else (-0.06, -0.03, 0.0, 0.03, 0.06)
    )
    numbers = {min(gpus - 1, max(1, round(balance + share * gpus))) for share in offsets}
    node = min(
        pool.per_node for pool in costing.hardware.pools
    )  # whole ones hold the model in groups of their own
    numbers |= {n for n in range(node, gpus, node) if abs(n - balance) < node}
    if (
        costing.work.useful < 1.0
    ):  # each trains its own steps of whatever tasks are left; with lending, all may train
        each = base.spec.blocks_per_task
        numbers |= {
            n
            for n in range(each, gpus, each)
            if min(numbers) <= n and (base.spec.tag or n <= max(numbers))
        }
    blocks = base.spec.groups_per_update * base.spec.tasks_per_portion * base.spec.blocks_per_task
    if blocks < ROUNDING * balance:  # full rounds, of trainers alone or of two that share tokens
        full = {n * math.ceil(blocks / rounds) for rounds in range(1, 2 * ROUNDING) for n in (1, 2)}
        numbers |= {number for number in full if min(numbers) <= number <= max(numbers)}
    return (
        numbers if base.first is None else numbers | {costing.hardware.find_pool(base.first).count}
    )


def _balanced_trainers(costing: Costing, base: Candidate) -> float:
    """Return the number of trainers at which training takes as long as generation, with pools in
    the order of `base`."""
    units, seconds = work_units(costing.work), seconds_per_unit(costing)
    pools = sorted(costing.hardware.pools, key=lambda pool: pool.name != base.first)
    stages = ("encode", "generate", "decode", "score")
    making = {
        p.name: sum(units[stage] * (seconds[stage][p.name] or 0.0) for stage in stages)
        for p in pools
    }
    half = costing.hardware.gpus // 2
    typical = base.with_changes(trainers=half, rollouts=costing.hardware.gpus - half)
    trainer = (
        next(_sharding_candidates(costing, typical), None) if is_allowed(costing, typical) else None
    )
    training = {p.name: units["train"] * (seconds["train"][p.name] or 0.0) for p in pools}
    if trainer is not None:
        per_task = {p.name: costing.pool_cell_seconds(p, trainer) for p in pools}
        training = {
            name: units["train"] * cell / trainer.spec.task_size for name, cell in per_task.items()
        }
    order = [p.name for p in pools for _ in range(p.count)]
    # Trainers are taken from the front of `order` and rollouts from its end, so the rates are sums
    # from both ends.
    train_rates = list(itertools.accumulate(1.0 / training[name] for name in order))
    make_rates = list(itertools.accumulate(1.0 / making[name] for name in reversed(order)))[::-1]
    gap = [abs(1.0 / train_rates[n - 1] - 1.0 / make_rates[n]) for n in range(1, len(order))]
    return float(1 + gap.index(min(gap)))


def promising_candidates(costing: Costing, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates with the lowest floors of each kind.

    A kind is given by lending, first pool of trainers, fragment size and sharding. On-policy
    candidates are also told apart by task size, because their floors say less. Floors within 1%
    count as equal. Then fewest trainers win: they lend least, and no floor charges for lending.
    """
    fitting = [
        candidate for candidate in dict.fromkeys(candidates) if not costing.find_misfits(candidate)
    ]
    unit = 0.01 * step_bound(costing)
    ranked = sorted(
        fitting,
        key=lambda candidate: (round(costing.step_floor(candidate) / unit), candidate.trainers),
    )
    kinds: dict[tuple[bool, str | None, int, str, int], list[Candidate]] = {}
    for candidate in ranked:
        spec = candidate.spec
        size = 0 if spec.async_steps else spec.task_size
        kinds.setdefault(
            (spec.tag, candidate.first, spec.gap, candidate.sharding, size), []
        ).append(candidate)
    return [
        candidate
        for kind in kinds.values()
        for candidate in kind[: PROMISING[kind[0].spec.async_steps]]
    ]


def neighbour_candidates(costing: Costing, candidate: Candidate) -> Iterator[Candidate]:
    """Yield candidates that differ from `candidate` in one choice."""
    gpus = costing.hardware.gpus
    nodes = candidate.with_changes(sharding="hsdp")
    if (
        candidate.sharding == "fsdp"
        and costing.shard_count(nodes) > 1
        and (held := fit_candidate(costing, nodes)) is not None
    ):
        yield held
    for size in task_sizes(costing):
        if size != candidate.spec.task_size:
            yield from _sharding_candidates(costing, candidate.with_changes(task_size=size))
    for size in step_batches(costing, candidate):
        yield candidate.with_changes(tsp_batch=size)
    yield candidate.with_changes(
        encoders=True
    )  # `fit_candidate` off-loads them only where cells are faster for it
    if candidate.rollouts == 0:
        yield candidate.with_changes(gap=0)
        yield candidate.with_changes(tsp_shard=not candidate.spec.tsp_shard)
        if _has_unequal_pools(costing):
            yield candidate.with_changes(shares=not candidate.shares)
        return
    full = candidate.trainers // 8 * 8
    for trainers in sorted(
        {candidate.trainers + offset for offset in (-2, -1, 1, 2)} | {full, full + 8}
    ):
        near = candidate.with_changes(trainers=trainers, rollouts=gpus - trainers, sharding="ddp")
        if trainers != candidate.trainers and 1 <= trainers < gpus and is_allowed(costing, near):
            yield from _sharding_candidates(costing, near)
    yield from _sharding_candidates(costing, candidate.with_changes(tag=not candidate.spec.tag))
    update = costing.work.spec.groups_per_update
    for gap in sorted({1, 2, 4, update // 2, update}):
        if gap != candidate.spec.gap and 0 < gap <= update:
            near = candidate.with_changes(gap=gap)
            yield near
            if (
                refitted := fit_candidate(costing, near)
            ) is not None:  # a longer fragment has room for more steps at once
                yield refitted
    if candidate.spec.async_steps:
        for fraction in (0.25, 0.5, 0.75, 1.0):
            yield candidate.with_changes(stale_fraction=fraction)


def _sharding_candidates(costing: Costing, base: Candidate) -> Iterator[Candidate]:
    """Yield `base` with each sharding that fits and makes cells faster than all shardings with
    fewer collectives.

    Trainers share the tokens of a sample (context above 1) only if nothing else fits, or if there
    are fewer samples than GPUs.
    """
    shardings = ("ddp",) if only_replicas(costing, base) else ("ddp", "hsdp", "fsdp")
    for context in (1, *context_sizes(costing, base)):
        fastest = math.inf
        for sharding in shardings:
            trial = base.with_changes(sharding=sharding, context=context)
            if costing.least_cell_seconds(trial) >= 0.995 * fastest:
                continue
            candidate = fit_candidate(costing, trial)
            if (
                candidate is not None
                and (seconds := costing.cell_seconds(candidate)) < 0.995 * fastest
            ):
                fastest = seconds
                yield candidate
        if fastest < math.inf and not _few_tasks(costing):
            return


def fit_candidate(costing: Costing, candidate: Candidate) -> Candidate | None:
    """Return `candidate` with the fastest K and placement of encoders that fit; None if nothing
    fits.

    Of equally fast K the largest is taken. Encoders stay on the GPU where that makes no cell
    slower.
    """
    sizes = step_batches(costing, candidate)
    if costing.find_misfits(
        candidate.with_changes(tsp_batch=sizes[-1], encoders=False)
    ):  # needs the least
        return None
    best, least = candidate, math.inf
    for size, encoders in itertools.product(sizes, (True, False)):
        trial = candidate.with_changes(tsp_batch=size, encoders=encoders)
        if (
            not costing.find_misfits(trial)
            and (seconds := costing.cell_seconds(trial)) < least * 0.999
        ):
            best, least = trial, seconds
    return best


def step_batches(costing: Costing, candidate: Candidate) -> list[int]:
    """Return values of K to try, the largest first. All but 1 leave each trainer at least four
    blocks of a fragment."""
    trained = costing.work.trained_steps
    tasks = candidate.spec.fragment_groups * candidate.spec.tasks_per_portion
    most = costing.work.most_tsp_batch or trained
    choices = {min(most, k) for k in (trained, -(-trained // 2), -(-trained // 4))}
    sizes = {1} | {k for k in choices if tasks * -(-trained // k) >= 4 * candidate.trainers}
    return sorted(sizes, reverse=True)


def task_sizes(costing: Costing) -> list[int]:
    """Return divisors of an update's samples of a group up to 8: one sample, and the largest
    three."""
    portion = costing.work.group_size // costing.work.spec.slices
    if costing.work.whole_groups:
        return [portion]
    sizes = [size for size in range(1, min(8, portion) + 1) if portion % size == 0]
    return sorted({1, *sizes[-3:]})


def _has_unequal_pools(costing: Costing) -> bool:
    return len({pool.tflops for pool in costing.hardware.pools}) > 1


def _few_tasks(costing: Costing) -> bool:
    """Return whether some GPUs would have no task of their own."""
    return costing.work.samples < costing.hardware.gpus


def is_allowed(costing: Costing, candidate: Candidate) -> bool:
    """Return whether a run would accept the candidate.

    The profile's roles must allow the split, the advantages the fragments, and `gradient_refusal`
    how trainers exchange gradients. Colocated ranks have nobody who generates while they train, so
    they are not asynchronous.
    """
    if candidate.spec.async_steps and candidate.rollouts == 0:
        return False
    if candidate.spec.gap and costing.work.whole_batch:
        return False
    try:
        return gradient_refusal(costing, candidate) is None
    except ValueError:
        return False
