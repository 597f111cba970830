"""Search for the fastest run: enumerate candidates, drop those that exceed memory, simulate the rest, rank them.

Candidates differ in allocation (colocated or disaggregated), roles of pools, task size, fragment size, steps per
forward (K), sharding, lending and asynchrony. A coarse pass covers the choices that matter most: roles, sharding and
task size. A fine pass then searches around the best candidates of each kind.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from digenrl.extensions.planner.bound import Bound
from digenrl.extensions.planner.candidate import Candidate, Costing
from digenrl.extensions.planner.outcome import Outcome, evaluate

PROMISING = (1, 2)
"""Disaggregated candidates to simulate of each kind, the lowest floors first: (on-policy, asynchronous)."""
NEAR = 2
"""Candidates of each kind whose neighbours are tried. A kind is given by lending, sharding, and the first pool of
trainers."""
WORTHWHILE = 0.999
"""Factor on the best step time that a new candidate must beat to be worth a simulation."""
RIVAL = 1.05
"""Factor on the best step time up to which candidates with other sharding stay in the search, because they may bear
disturbances better."""
CUTOFF = 1.25
"""Factor on the best step times. A candidate whose second step takes longer is not simulated to its end."""
FINALISTS = 2
"""Candidates of each kind that are simulated rank by rank."""
MOST_FINALISTS = 10
"""Most candidates of each kind that are simulated rank by rank, while further quick results look better than the
exact ones."""
ROUNDS = 4
"""Most rounds of searching around the best candidates."""
ROUNDING = 16
"""Blocks of an update per trainer below which splits without odd blocks are tried too."""


class PlanError(ValueError):
    """No candidate fits."""


@dataclass(frozen=True)
class Plan:
    """Result of a search: the outcomes, best first, and the bound."""

    costing: Costing
    bound: Bound
    outcomes: tuple[Outcome, ...]
    simulated: int

    @property
    def bound_s(self) -> float:
        return self.bound.seconds

    def best(self, kind: str) -> Outcome | None:
        """Return the best outcome of a kind (colocated | on_policy | async), or None."""
        tests = {
            "colocated": lambda c: c.rollouts == 0,
            "on_policy": lambda c: c.spec.async_steps == 0,
            "async": lambda c: c.spec.async_steps == 1,
        }
        return next((outcome for outcome in self.outcomes if tests[kind](outcome.candidate)), None)


def make_plan(
    costing: Costing, steps: int | None = None, fixed: Mapping[str, Any] | None = None, asynchronous: bool = True
) -> Plan:
    """Search for the fastest way to run `costing`.

    Args:
        steps: RL steps of each finalist's simulation; None = until its step no longer changes.
        fixed: choices that the user made: fields of `Candidate` and of `ScheduleSpec`.
        asynchronous: whether one-step asynchrony may be chosen.

    Raises:
        PlanError: no candidate fits. The message says how much memory is missing, and where.
    """
    with _collecting_nothing():
        return _make_plan(costing, steps, fixed or {}, asynchronous)


@contextmanager
def _collecting_nothing() -> Iterator[None]:
    """Switch the garbage collector off: a plan leaves no reference cycles, and collecting is a sixth of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _make_plan(costing: Costing, steps: int | None, fixed: Mapping[str, Any], asynchronous: bool) -> Plan:
    bound = costing.bound()
    seen: dict[Candidate, Outcome] = {}
    finalists: dict[Candidate, Outcome] = {}

    def tried(candidates: Iterable[Candidate], known: Iterable[Outcome] = ()) -> list[Outcome]:
        """Simulate the candidates that fit and might beat the `known` outcomes; return all of them, best first.

        Candidates with low floors come first. Each kind of sharding competes with its like only: a slightly slower run
        in which fewer ranks wait for each other may bear disturbances better.
        """
        found = {outcome.candidate: outcome for outcome in known}
        fitting = [
            candidate
            for candidate in dict.fromkeys(_fixed(costing, candidates, fixed))
            if not (candidate.spec.gap and costing.work.whole_batch) and not costing.misfits(candidate)
        ]
        for candidate in sorted(fitting, key=costing.floor):
            if candidate not in seen:
                best = sorted(outcome.expected_s for outcome in found.values())[:FINALISTS]
                alike = (o.expected_s for o in found.values() if o.candidate.sharding == candidate.sharding)
                limits = [WORTHWHILE * min(alike, default=math.inf), RIVAL * min(best, default=math.inf)]
                if known and not candidate.spec.async_steps:
                    limits.append(on_policy)
                if costing.floor(candidate) >= min(limits):
                    continue
                cutoff_s = CUTOFF * best[-1] if len(best) == FINALISTS else math.inf
                seen[candidate] = evaluate(costing, candidate, bound, cutoff_s=cutoff_s)
            found[candidate] = seen[candidate]
        return sorted(found.values(), key=lambda outcome: outcome.expected_s)

    coarse = [_colocated(costing)] if not fixed.get("rollouts") else []
    if fixed.get("rollouts") != 0:
        numbers = {int(fixed["trainers"])} if "trainers" in fixed else None
        for async_steps in range(1 + asynchronous):
            candidates = _fixed(costing, _disaggregated(costing, async_steps, numbers), fixed)
            coarse.append(iter(_promising(costing, candidates)))
    on_policy = math.inf
    """Seconds per step of the fastest on-policy run. Neighbours of on-policy runs must have a lower floor."""
    for candidates in coarse:
        best = tried(candidates)
        for _ in range(ROUNDS):
            around = [near for outcome in _centres(best) for near in _neighbours(costing, outcome.candidate)]
            before, best = _rivals(best), tried(around, best)
            if all(seconds >= WORTHWHILE * before.get(held, math.inf) for held, seconds in _rivals(best).items()):
                break
        replayed: list[Outcome] = []
        finalists_of_kind = FINALISTS if not best or best[0].expected_s <= RIVAL * on_policy else 1
        for outcome in _contenders(best):
            steady = [other.step_s for other in replayed if other.settled]
            enough = len(steady) >= finalists_of_kind and outcome.expected_s >= min(steady)
            enough = enough or len(replayed) == MOST_FINALISTS
            if enough or outcome.expected_s > RIVAL * best[0].expected_s:
                continue
            exact = evaluate(costing, outcome.candidate, bound, exact=True, steps=steps)
            replayed.append(replace(exact, quick_s=outcome.step_s))
        finalists |= {outcome.candidate: outcome for outcome in replayed}
        if best and not best[0].candidate.spec.async_steps:
            on_policy = min(on_policy, best[0].expected_s)
    if not seen:
        raise PlanError(_why_nothing(costing))
    return Plan(costing, bound, tuple(_ranked(finalists.values())), len(seen))


def _ranked(outcomes: Collection[Outcome]) -> list[Outcome]:
    """Sort outcomes: settled before unsettled, then by `robust_s`.

    Runs that are more than `RIVAL` times as slow as the fastest come after the others. On-policy runs are compared with
    on-policy runs only, because asynchronous ones may be left out afterwards.
    """
    settled = [outcome for outcome in outcomes if outcome.settled]

    def slow(outcome: Outcome) -> bool:
        alike = (o.step_s for o in settled if o.candidate.spec.async_steps <= outcome.candidate.spec.async_steps)
        return outcome.step_s > RIVAL * min(alike, default=math.inf)

    return sorted(outcomes, key=lambda outcome: (not outcome.settled, slow(outcome), outcome.robust_s))


def _rivals(ranked: list[Outcome]) -> dict[str, float]:
    """Return sharding -> seconds of its best run, without those slower than `RIVAL` times the best."""
    fastest = {outcome.candidate.sharding: outcome.expected_s for outcome in reversed(ranked)}
    return {held: seconds for held, seconds in fastest.items() if seconds <= RIVAL * min(fastest.values())}


def _centres(ranked: list[Outcome]) -> list[Outcome]:
    """Return the `NEAR` best of each kind, given by lending, sharding and first pool of trainers."""
    kinds: dict[tuple[bool, str, str | None], list[Outcome]] = {}
    for outcome in ranked:
        candidate = outcome.candidate
        kinds.setdefault((candidate.spec.tag, candidate.sharding, candidate.first), []).append(outcome)
    return [outcome for kind in kinds.values() for outcome in kind[:NEAR]]


def _contenders(ranked: list[Outcome]) -> list[Outcome]:
    """Reorder `ranked`: first the best of each fragment size and sharding, then the others.

    Quick simulations of equal fragment size and sharding have similar errors, so the exact ones should cover each.
    """
    kinds: dict[tuple[str, int], list[Outcome]] = {}
    for outcome in ranked:
        kinds.setdefault((outcome.candidate.sharding, outcome.candidate.spec.gap), []).append(outcome)
    return [own[0] for own in kinds.values()] + [outcome for own in kinds.values() for outcome in own[1:]]


def _fixed(costing: Costing, candidates: Iterable[Candidate], fixed: Mapping[str, Any]) -> Iterator[Candidate]:
    """Yield `candidates` with the user's choices, and with steps per forward that fit these choices."""
    for candidate in candidates:
        changed = candidate.but(**fixed) if fixed else candidate
        if not _allowed(costing, changed):
            continue
        if changed != candidate and "tsp_batch" not in fixed:
            changed = (fitted(costing, changed) or changed).but(**fixed)
        yield changed


def sync_run(costing: Costing, gpus: int) -> Outcome | None:
    """Return the outcome of `schedule=sync` on `gpus` GPUs at its best split.

    Nothing overlaps in it, and a forward trains one denoising step.
    """
    found = []
    for trainers, sharding in itertools.product(range(1, gpus), ("ddp", "hsdp", "fsdp")):
        candidate = costing.candidate(trainers, gpus - trainers, sharding=sharding, gap=0, tsp_shard=False)
        if _allowed(costing, candidate) and not costing.misfits(candidate):
            found.append(candidate)
    return fastest(costing, found, costing.bound())


def fastest(costing: Costing, candidates: Iterable[Candidate], bound: Bound) -> Outcome | None:
    """Return the fastest of `candidates`. A candidate whose floor exceeds the best so far is not simulated."""
    floors = {candidate: costing.floor(candidate) for candidate in dict.fromkeys(candidates)}
    best: Outcome | None = None
    for candidate, floor in sorted(floors.items(), key=lambda item: item[1]):
        if best is not None and floor >= best.step_s:
            break
        outcome = evaluate(costing, candidate, bound)
        best = outcome if best is None or outcome.step_s < best.step_s else best
    return best


def _why_nothing(costing: Costing) -> str:
    """Return why even the smallest candidates cannot run: colocated, and half of the GPUs in each role."""
    gpus, size, pools = costing.hardware.gpus, task_sizes(costing)[0], costing.hardware.pools
    training, generating = (sum(p.count for p in pools if p.role == role) for role in ("trainer", "rollout"))
    trials = {}
    if not generating:
        trials["colocated"] = costing.candidate(gpus, 0, sharding="fsdp", task_size=size)
    if gpus > 1:
        trainers = max(training, min(gpus // 2, gpus - generating))
        trials[f"{trainers} trainers"] = costing.candidate(trainers, gpus - trainers, sharding="fsdp", task_size=size)
    reasons = [
        f"{name}: {', '.join(costing.misfits(trial))}"
        for name, trial in trials.items()
        if trial.trainers and _allowed(costing, trial)
    ]
    if not reasons:
        roles = ", ".join(f"{pool.name}: {pool.count} {pool.role}" for pool in pools)
        return f"the pools' roles leave no GPU to train ({roles}): set the role of one of them to auto or trainer."
    remedy = "Use more or larger GPUs, LoRA, a smaller resolution or fewer frames."
    return f"nothing fits: {'; '.join(reasons)}. {remedy}"


def fitted(costing: Costing, candidate: Candidate) -> Candidate | None:
    """Return `candidate` with the fastest K and placement of encoders that fit; None if nothing fits.

    Of equally fast K the largest is taken. Encoders stay on the GPU where that makes no cell slower.
    """
    best: tuple[float, Candidate] | None = None
    for size in step_batches(costing, candidate):
        for encoders in (True, False):
            trial = candidate.but(tsp_batch=size, encoders=encoders)
            if costing.misfits(trial):
                continue
            seconds = costing.cell_seconds(trial)
            if best is None or seconds < best[0] * 0.999:
                best = seconds, trial
            if costing.keeps_everything(trial):
                break
    return best[1] if best is not None else None


def step_batches(costing: Costing, candidate: Candidate) -> list[int]:
    """Return values of K to try, the largest first. All but 1 leave each trainer at least four blocks of a fragment."""
    trained = costing.work.trained_steps
    tasks = candidate.spec.fragment_groups * candidate.spec.tasks_per_portion
    choices = (trained, -(-trained // 2), -(-trained // 4))
    sizes = {1} | {k for k in choices if tasks * -(-trained // k) >= 4 * candidate.trainers}
    return sorted(sizes, reverse=True)


def task_sizes(costing: Costing) -> list[int]:
    """Return divisors of an update's samples of a group up to 8: one sample, and the largest three."""
    portion = costing.work.group_size // costing.work.spec.slices
    sizes = [size for size in range(1, min(8, portion) + 1) if portion % size == 0]
    return sorted({1, *sizes[-3:]})


def _unequal(costing: Costing) -> bool:
    return len({pool.tflops for pool in costing.hardware.pools}) > 1


def _held(costing: Costing, base: Candidate) -> Iterator[Candidate]:
    """Yield `base` with each sharding that fits and makes cells faster than all shardings with fewer collectives.

    Trainers share the tokens of a sample (context above 1) only if nothing else fits, or if there are fewer samples
    than GPUs.
    """
    for context in (1, *costing.contexts(base)):
        fastest = math.inf
        for sharding in ("ddp", "hsdp", "fsdp") if base.trainers > 1 else ("ddp",):
            trial = base.but(sharding=sharding, context=context)
            if costing.least_cell_seconds(trial) >= 0.995 * fastest:
                continue
            candidate = fitted(costing, trial)
            if candidate is not None and (seconds := costing.cell_seconds(candidate)) < 0.995 * fastest:
                fastest = seconds
                yield candidate
        if fastest < math.inf and not _few_tasks(costing):
            return


def _few_tasks(costing: Costing) -> bool:
    """Return whether some GPUs would have no task of their own."""
    return costing.work.samples < costing.hardware.gpus


def _colocated(costing: Costing) -> Iterator[Candidate]:
    if any(pool.role == "rollout" for pool in costing.hardware.pools) or len(costing.hardware.places) > 1:
        return
    gpus, sizes = costing.hardware.gpus, task_sizes(costing)
    for size in sizes:
        for split in (False, True) if not _unequal(costing) else (False,):  # an equal split repeats less encoding
            base = costing.candidate(gpus, 0, task_size=size, gap=0, shares=_unequal(costing), static_claims=split)
            yield from _held(costing, base)


def _disaggregated(costing: Costing, async_steps: int, numbers: set[int] | None = None) -> Iterator[Candidate]:
    """Yield candidates of each schedule, with numbers of trainers around the balance or with the given `numbers`."""
    gpus = costing.hardware.gpus
    if gpus < 2:
        return
    flexible = all(pool.role == "auto" for pool in costing.hardware.pools)
    firsts = [pool.name for pool in costing.hardware.pools] if flexible and len(costing.hardware.pools) > 1 else [None]
    for first in firsts:
        typical = costing.candidate(1, gpus - 1, first=first, async_steps=async_steps, shares=_unequal(costing))
        if costing.work.whole_batch:  # only a whole stale batch overlaps with training
            typical = typical.but(stale_fraction=1.0)
        found = False
        for base in _schedules(costing, typical):
            for candidate in _allocations(costing, base, numbers or _around_balance(costing, base)):
                found = True
                yield candidate
        if not found:  # memory decides, not the balance
            every = {max(1, gpus * eighth // 8) for eighth in range(1, 8)}
            yield from _allocations(costing, typical.but(task_size=task_sizes(costing)[0]), numbers or every)


def _schedules(costing: Costing, typical: Candidate) -> Iterator[Candidate]:
    """Yield `typical` with every task size, with lending and without.

    Asynchronous steps overlap, so their fragments may also be half of the batch (within one update). Half a batch
    splits more evenly, and the other half still overlaps. Where tasks are few, each is a single sample.
    """
    half = min(costing.work.spec.groups_per_update, max(1, costing.work.prompts // 2))
    gaps = {0} if costing.work.whole_batch else {1, half if typical.spec.async_steps else 1}
    sizes = task_sizes(costing)[: 1 if _few_tasks(costing) else None]
    stale = {0.5, 1.0} if typical.spec.async_steps and not costing.work.whole_batch else {typical.spec.stale_fraction}
    for size, gap, tag, part in itertools.product(sizes, gaps, (False, True), sorted(stale)):
        yield typical.but(task_size=size, gap=gap, tag=tag, stale_fraction=part)


def _promising(costing: Costing, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates with the lowest floors of each kind.

    A kind is given by lending, first pool of trainers, fragment size and sharding. On-policy candidates are also told
    apart by task size, because their floors say less. Floors within 1% count as equal. Then fewest trainers win: they
    lend least, and no floor charges for lending.
    """
    fitting = [candidate for candidate in dict.fromkeys(candidates) if not costing.misfits(candidate)]
    unit = 0.01 * costing.bound().seconds
    ranked = sorted(fitting, key=lambda candidate: (round(costing.floor(candidate) / unit), candidate.trainers))
    kinds: dict[tuple[bool, str | None, int, str, int], list[Candidate]] = {}
    for candidate in ranked:
        spec = candidate.spec
        size = 0 if spec.async_steps else spec.task_size
        kinds.setdefault((spec.tag, candidate.first, spec.gap, candidate.sharding, size), []).append(candidate)
    return [candidate for kind in kinds.values() for candidate in kind[: PROMISING[kind[0].spec.async_steps]]]


def _around_balance(costing: Costing, base: Candidate) -> set[int]:
    """Return numbers of trainers to try: around the balance of generation and training, and whole pools."""
    gpus, balance = costing.hardware.gpus, _balance(costing, base)
    offsets = [-0.06, -0.03, 0.0, 0.03, 0.06]
    if base.spec.tag:  # what lending trainers generate, rollout ranks need not
        offsets = [-0.03, 0.0, 0.03, 0.06, 0.09, 0.12]
    numbers = {min(gpus - 1, max(1, round(balance + share * gpus))) for share in offsets}
    node = min(pool.per_node for pool in costing.hardware.pools)  # whole ones hold the model in groups of their own
    numbers |= {n for n in range(node, gpus, node) if abs(n - balance) < node}
    if costing.work.useful < 1.0:  # each trains its own steps of whatever tasks are left; with lending, all may train
        each = base.spec.blocks_per_task
        numbers |= {n for n in range(each, gpus, each) if min(numbers) <= n and (base.spec.tag or n <= max(numbers))}
    blocks = base.spec.groups_per_update * base.spec.tasks_per_portion * base.spec.blocks_per_task
    if blocks < ROUNDING * balance:  # full rounds, of trainers alone or of two that share tokens
        full = {n * math.ceil(blocks / rounds) for rounds in range(1, 2 * ROUNDING) for n in (1, 2)}
        numbers |= {number for number in full if min(numbers) <= number <= max(numbers)}
    return numbers if base.first is None else numbers | {costing.hardware.pool(base.first).count}


def _allocations(costing: Costing, base: Candidate, numbers: set[int]) -> Iterator[Candidate]:
    """Yield `base` with each number of trainers, in the ways that the profile's roles and memory allow."""
    for trainers in sorted(numbers):
        trial = base.but(trainers=trainers, rollouts=costing.hardware.gpus - trainers)
        if not _allowed(costing, trial):
            continue
        held = list(_held(costing, trial))
        yield from held or _held(costing, trial.but(tag=False))


def _balance(costing: Costing, base: Candidate) -> float:
    """Return the number of trainers at which training takes as long as generation, with pools in the order of
    `base`."""
    units, seconds = costing.work_units(), costing.seconds_per_unit()
    pools = sorted(costing.hardware.pools, key=lambda pool: pool.name != base.first)
    stages = ("encode", "generate", "decode", "score")
    making = {p.name: sum(units[stage] * (seconds[stage][p.name] or 0.0) for stage in stages) for p in pools}
    half = costing.hardware.gpus // 2
    typical = base.but(trainers=half, rollouts=costing.hardware.gpus - half)
    trainer = next(_held(costing, typical), None) if _allowed(costing, typical) else None
    training = {p.name: units["train"] * (seconds["train"][p.name] or 0.0) for p in pools}
    if trainer is not None:
        per_task = {p.name: costing.pool_cell_seconds(p, trainer) for p in pools}
        training = {name: units["train"] * cell / trainer.spec.task_size for name, cell in per_task.items()}
    order = [p.name for p in pools for _ in range(p.count)]
    # Trainers are taken from the front of `order` and rollouts from its end, so the rates are sums from both ends.
    train_rates = list(itertools.accumulate(1.0 / training[name] for name in order))
    make_rates = list(itertools.accumulate(1.0 / making[name] for name in reversed(order)))[::-1]
    gap = [abs(1.0 / train_rates[n - 1] - 1.0 / make_rates[n]) for n in range(1, len(order))]
    return float(1 + gap.index(min(gap)))


def _neighbours(costing: Costing, candidate: Candidate) -> Iterator[Candidate]:
    """Yield candidates that differ from `candidate` in one choice."""
    gpus = costing.hardware.gpus
    nodes = candidate.but(sharding="hsdp")
    if candidate.sharding == "fsdp" and costing.shards(nodes) > 1 and (held := fitted(costing, nodes)) is not None:
        yield held
    for size in task_sizes(costing):
        if size != candidate.spec.task_size:
            yield from _held(costing, candidate.but(task_size=size))
    for size in step_batches(costing, candidate):
        yield candidate.but(tsp_batch=size)
    yield candidate.but(encoders=not candidate.encoders)
    if candidate.rollouts == 0:
        yield candidate.but(gap=0)
        yield candidate.but(tsp_shard=not candidate.spec.tsp_shard)
        if _unequal(costing):
            yield candidate.but(shares=not candidate.shares)
        return
    full = candidate.trainers // 8 * 8
    for trainers in sorted({candidate.trainers + offset for offset in (-2, -1, 1, 2)} | {full, full + 8}):
        near = candidate.but(trainers=trainers, rollouts=gpus - trainers)
        if trainers != candidate.trainers and 1 <= trainers < gpus and _allowed(costing, near):
            yield from _held(costing, near)
    yield from _held(costing, candidate.but(tag=not candidate.spec.tag))
    update = costing.work.spec.groups_per_update
    for gap in sorted({1, 2, 4, update // 2, update}):
        if gap != candidate.spec.gap and 0 < gap <= update:
            near = candidate.but(gap=gap)
            yield near
            if (refitted := fitted(costing, near)) is not None:  # a longer fragment has room for more steps at once
                yield refitted
    if candidate.spec.async_steps:
        for fraction in (0.25, 0.5, 0.75, 1.0):
            yield candidate.but(stale_fraction=fraction)


def _allowed(costing: Costing, candidate: Candidate) -> bool:
    """Return whether the profile's roles allow the split."""
    try:
        costing.placed(candidate)
    except ValueError:
        return False
    return True
