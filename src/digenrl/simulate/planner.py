"""The planner: enumerate, drop what does not fit into memory, simulate, rank.

Colocated and disaggregated, allocation, pools' roles, rollout batch, fragment size, K, sharding, lending, hand-off,
asynchrony. A coarse pass over what decides most (who does what, how the model is held, the task size), then a fine pass
around the best of each kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from digenrl.simulate.bound import Bound
from digenrl.simulate.candidate import Bench, Candidate
from digenrl.simulate.floor import floor_seconds
from digenrl.simulate.outcome import Outcome, evaluate

PROMISING = 6
"""Disaggregated candidates of the lowest floors that are simulated, of each kind; half for steps of many samples."""
MANY_SAMPLES = 600
"""From here on simulating a step takes tenths of a second, so fewer are."""


class PlanError(ValueError):
    """Nothing fits."""


@dataclass(frozen=True)
class Plan:
    """Outcomes, best first, and the best of each kind."""

    bench: Bench
    bound: Bound
    outcomes: tuple[Outcome, ...]
    simulated: int

    @property
    def bound_s(self) -> float:
        return self.bound.seconds

    def best(self, kind: str) -> Outcome | None:
        """colocated | on_policy | async."""
        tests = {
            "colocated": lambda c: c.rollouts == 0,
            "on_policy": lambda c: c.async_steps == 0,
            "async": lambda c: c.async_steps == 1,
        }
        return next((outcome for outcome in self.outcomes if tests[kind](outcome.candidate)), None)


def make_plan(bench: Bench, fine: int | None = None, rounds: int = 2) -> Plan:
    """Search for the fastest way to run `bench`.

    Args:
        fine: candidates of each kind whose neighbourhood is searched (default: 4; 2 for steps of many samples, which
            take longer to simulate),
        rounds: this many times.

    Raises:
        PlanError: no candidate fits; says what is missing where.
    """
    bound = bench.bound()
    fine = fine or (2 if bench.work.samples > MANY_SAMPLES else 4)
    seen: dict[Candidate, Outcome] = {}
    finalists: dict[Candidate, Outcome] = {}

    def tried(candidates: Iterable[Candidate], fastest: float = math.inf) -> list[Outcome]:
        """Outcomes, best first, of the candidates that fit and that might beat `fastest`."""
        found = {}
        for candidate in candidates:
            if candidate not in seen:
                if bench.misfits(candidate) or _floor(bench, candidate) >= fastest:
                    continue
                seen[candidate] = evaluate(bench, candidate, bound)
            found[candidate] = seen[candidate]
            fastest = min(fastest, found[candidate].step_s)
        return sorted(found.values(), key=lambda outcome: outcome.step_s)

    for coarse in (_colocated(bench), *(_promising(bench, _disaggregated(bench, steps)) for steps in (0, 1))):
        best = tried(coarse)
        for _ in range(rounds):
            around = [near for outcome in best[:fine] for near in _neighbours(bench, outcome.candidate)]
            better = tried([*(outcome.candidate for outcome in best), *around])
            improved = bool(better) and better[0].step_s < best[0].step_s * 0.999
            best = better
            if not improved:
                break
        for outcome in best[:5]:
            finalists[outcome.candidate] = evaluate(bench, outcome.candidate, bound, exact=True)
    if not seen:
        raise PlanError(_why_nothing(bench))
    ranked = tuple(sorted(finalists.values(), key=lambda outcome: outcome.step_s))
    return Plan(bench, bound, ranked, len(seen))


def fastest(bench: Bench, candidates: Iterable[Candidate], bound: Bound) -> Outcome | None:
    """The best of `candidates`, those of the lowest floors first: what cannot beat the best so far is not simulated."""
    floors = {candidate: _floor(bench, candidate) for candidate in dict.fromkeys(candidates)}
    best: Outcome | None = None
    for candidate, floor in sorted(floors.items(), key=lambda item: item[1]):
        if best is not None and floor >= best.step_s:
            break
        outcome = evaluate(bench, candidate, bound)
        best = outcome if best is None or outcome.step_s < best.step_s else best
    return best


def _why_nothing(bench: Bench) -> str:
    """Why even the smallest candidates cannot run: colocated, and half of the GPUs in either role."""
    gpus, size = bench.hardware.gpus, task_sizes(bench)[0]
    trials = {"colocated": Candidate(gpus, 0, "fsdp", None, size)}
    if any(pool.role == "rollout" for pool in bench.hardware.pools):
        trials.clear()
    if gpus > 1:
        trainers = gpus // 2
        counts = {role: sum(p.count for p in bench.hardware.pools if p.role == role) for role in ("trainer", "rollout")}
        trainers = max(counts["trainer"], min(trainers, gpus - counts["rollout"]))
        trials[f"{trainers} trainers"] = Candidate(trainers, gpus - trainers, "fsdp", None, size)
    reasons = [
        f"{name}: {', '.join(bench.misfits(trial))}"
        for name, trial in trials.items()
        if trial.trainers and _allowed(bench, trial)
    ]
    if not reasons:
        roles = ", ".join(f"{pool.name}: {pool.count} {pool.role}" for pool in bench.hardware.pools)
        return f"the pools' roles leave no GPU to train ({roles}): set the role of one of them to auto or trainer."
    remedy = "Use more or larger GPUs, LoRA, a smaller resolution or fewer frames."
    return f"nothing fits: {'; '.join(reasons)}. {remedy}"


def fitted(bench: Bench, candidate: Candidate) -> Candidate | None:
    """`candidate` with the K whose cells are fastest (the largest of equals) and the encoders where they cost nothing;
    None if nothing fits."""
    best: tuple[float, Candidate] | None = None
    for size in step_batches(bench, candidate):
        for encoders in (True, False):
            trial = replace(candidate, tsp_batch=size, encoders=encoders)
            if bench.misfits(trial):
                continue
            seconds = bench.cell_seconds(trial)
            if best is None or seconds < best[0] * 0.999:
                best = seconds, trial
    return best[1] if best is not None else None


def step_batches(bench: Bench, candidate: Candidate) -> list[int]:
    """Values of K worth trying, the largest first: each leaves a trainer at least four blocks of a fragment."""
    work, trained = bench.work, bench.work.trained_steps
    groups = candidate.gap or work.prompts // work.updates
    tasks = groups * (work.group_size // candidate.task_size)
    choices = (trained, -(-trained // 2), -(-trained // 4))
    sizes = {1} | {k for k in choices if tasks * -(-trained // k) >= 4 * candidate.trainers}
    return sorted(sizes, reverse=True)


def task_sizes(bench: Bench) -> list[int]:
    """Divisors of the group size up to 8: one sample, and the largest three."""
    group = bench.work.group_size
    sizes = [size for size in range(1, min(8, group) + 1) if group % size == 0]
    return sorted({1, *sizes[-3:]})


def _unequal(bench: Bench) -> bool:
    return len({pool.tflops for pool in bench.hardware.pools}) > 1


def _held(bench: Bench, base: Candidate) -> Iterator[Candidate]:
    """`base` held in every way that fits and that makes cells faster than the ways with fewer collectives."""
    fastest = math.inf
    for sharding in ("ddp", "hsdp", "fsdp") if base.trainers > 1 else ("ddp",):
        candidate = fitted(bench, replace(base, sharding=sharding))
        if candidate is not None and (seconds := bench.cell_seconds(candidate)) < 0.995 * fastest:
            fastest = seconds
            yield candidate


def _colocated(bench: Bench) -> Iterator[Candidate]:
    if any(pool.role == "rollout" for pool in bench.hardware.pools):
        return
    gpus, sizes = bench.hardware.gpus, task_sizes(bench)
    for size in sizes:
        for split in (False, True) if not _unequal(bench) else (False,):  # an equal split repeats less encoding
            base = Candidate(gpus, 0, task_size=size, gap=0, shares=_unequal(bench), static_claims=split)
            yield from _held(bench, base)


def _disaggregated(bench: Bench, async_steps: int) -> Iterator[Candidate]:
    gpus = bench.hardware.gpus
    if gpus < 2:
        return
    flexible = all(pool.role == "auto" for pool in bench.hardware.pools)
    firsts = [pool.name for pool in bench.hardware.pools] if flexible and len(bench.hardware.pools) > 1 else [None]
    for first in firsts:
        typical = Candidate(1, gpus - 1, first=first, async_steps=async_steps, shares=_unequal(bench))
        found = False
        for base in _schedules(bench, typical):
            for candidate in _allocations(bench, base, _around_balance(bench, base)):
                found = True
                yield candidate
        if not found:  # memory decides, not the balance
            every = {max(1, gpus * eighth // 8) for eighth in range(1, 8)}
            yield from _allocations(bench, replace(typical, task_size=task_sizes(bench)[0]), every)


def _schedules(bench: Bench, typical: Candidate) -> Iterator[Candidate]:
    """`typical` with every task size, with lending and without. Asynchronous steps overlap, so there a fragment may
    also be half of the batch (within one update), which splits more evenly and leaves the other half to overlap."""
    half = min(bench.work.prompts // bench.work.updates, max(1, bench.work.prompts // 2))
    for size in task_sizes(bench):
        for gap in {1, half if typical.async_steps else 1}:
            for tag, handoff in ((False, False), (True, False), (True, typical.async_steps == 0)):
                yield replace(typical, task_size=size, gap=gap, tag=tag, handoff=handoff)


def _floor(bench: Bench, candidate: Candidate) -> float:
    return floor_seconds(bench.spec(candidate), bench.cluster(candidate))


def _promising(bench: Bench, candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates of the lowest floors: from each pool first, with lending and without; on-policy ones, whose floors
    say less, also with each task size."""
    fitting = [candidate for candidate in dict.fromkeys(candidates) if not bench.misfits(candidate)]
    ranked = sorted(fitting, key=lambda candidate: _floor(bench, candidate))
    kinds: dict[tuple[bool, str | None, int], list[Candidate]] = {}
    for candidate in ranked:
        size = 0 if candidate.async_steps else candidate.task_size
        kinds.setdefault((candidate.tag, candidate.first, size), []).append(candidate)
    keep = PROMISING // 2 if bench.work.samples > MANY_SAMPLES else PROMISING
    return [candidate for kind in kinds.values() for candidate in kind[:keep]]


def _around_balance(bench: Bench, base: Candidate) -> set[int]:
    """Numbers of trainers around the balance of generation and training, and whole pools."""
    gpus, balance = bench.hardware.gpus, _balance(bench, base)
    offsets = [-0.06, -0.03, 0.0, 0.03, 0.06]
    if base.tag:  # what lending trainers generate, rollout ranks need not
        offsets = [-0.03, 0.0, 0.03, 0.06, 0.09, 0.12]
    numbers = {min(gpus - 1, max(1, round(balance + share * gpus))) for share in offsets}
    return numbers if base.first is None else numbers | {bench.hardware.pool(base.first).count}


def _allocations(bench: Bench, base: Candidate, numbers: set[int]) -> Iterator[Candidate]:
    """`base` with each number of trainers, in the ways that the profile's roles and memory allow."""
    for trainers in sorted(numbers):
        trial = replace(base, trainers=trainers, rollouts=bench.hardware.gpus - trainers)
        if not _allowed(bench, trial):
            continue
        held = list(_held(bench, trial))
        yield from held or _held(bench, replace(trial, tag=False))


def _balance(bench: Bench, base: Candidate) -> float:
    """Trainers at which training takes as long as generation, pools taken in the order of `base`."""
    units, seconds = bench.work_units(), bench.seconds_per_unit()
    pools = sorted(bench.hardware.pools, key=lambda pool: pool.name != base.first)
    stages = ("encode", "generate", "decode", "score")
    making = {p.name: sum(units[stage] * (seconds[stage][p.name] or 0.0) for stage in stages) for p in pools}
    half = bench.hardware.gpus // 2
    typical = replace(base, trainers=half, rollouts=bench.hardware.gpus - half)
    trainer = next(_held(bench, typical), None) if _allowed(bench, typical) else None
    training = {p.name: units["train"] * (seconds["train"][p.name] or 0.0) for p in pools}
    if trainer is not None:
        per_task = {p.name: bench.pool_cell_seconds(p, trainer) for p in pools}
        training = {name: units["train"] * cell / trainer.task_size for name, cell in per_task.items()}
    order = [p.name for p in pools for _ in range(p.count)]
    gap = []
    for trainers in range(1, len(order)):
        train_rate = sum(1.0 / training[name] for name in order[:trainers])
        make_rate = sum(1.0 / making[name] for name in order[trainers:])
        gap.append((abs(1.0 / train_rate - 1.0 / make_rate), trainers))
    return float(min(gap)[1])


def _neighbours(bench: Bench, candidate: Candidate) -> Iterator[Candidate]:
    """Candidates that differ in one choice."""
    gpus = bench.hardware.gpus
    for size in task_sizes(bench):
        if size != candidate.task_size:
            yield from _held(bench, replace(candidate, task_size=size))
    for size in step_batches(bench, candidate):
        yield replace(candidate, tsp_batch=size)
    if candidate.rollouts == 0:
        yield replace(candidate, gap=0)
        yield replace(candidate, tsp_shard=not candidate.tsp_shard)
        if _unequal(bench):
            yield replace(candidate, shares=not candidate.shares)
        return
    nodes = candidate.trainers // 8 * 8
    for trainers in sorted({candidate.trainers + offset for offset in (-3, -2, -1, 1, 2, 3)} | {nodes, nodes + 8}):
        near = replace(candidate, trainers=trainers, rollouts=gpus - trainers)
        if trainers != candidate.trainers and 1 <= trainers < gpus and _allowed(bench, near):
            yield from _held(bench, near)
    yield replace(candidate, handoff=not candidate.handoff)
    yield from _held(bench, replace(candidate, tag=not candidate.tag))
    update = bench.work.prompts // bench.work.updates
    for gap in sorted({1, 2, 4, update // 2, update}):
        if gap != candidate.gap and 0 < gap <= update:
            near = replace(candidate, gap=gap)
            yield near
            if (refitted := fitted(bench, near)) is not None:  # a longer fragment has room for more steps in a forward
                yield refitted
    if candidate.async_steps:
        for fraction in (0.25, 0.75, 1.0):
            yield replace(candidate, stale_fraction=fraction)
    yield replace(candidate, order="arrival" if candidate.order == "canonical" else "canonical")


def _allowed(bench: Bench, candidate: Candidate) -> bool:
    """Whether the profile's roles allow the split."""
    try:
        bench.placed(candidate)
    except ValueError:
        return False
    return True
