"""The planner: enumerate, drop what does not fit into memory, simulate, rank.

Colocated and disaggregated, allocation, pools' roles, rollout batch, fragment size, K, sharding, lending,
asynchrony. A coarse pass over what decides most (who does what, how the model is held, the task size), then a fine pass
around the best of each kind.
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
from digenrl.extensions.planner.candidate import Candidate
from digenrl.extensions.planner.costing import Costing
from digenrl.extensions.planner.enumeration import (
    allowed,
    colocated,
    disaggregated,
    fitted,
    neighbours,
    promising,
    task_sizes,
)
from digenrl.extensions.planner.outcome import Outcome, evaluate

NEAR = 2
"""Candidates whose neighbourhood is searched, of each kind: with lending or without, replicated or sharded, the pool
that trainers come from first."""
WORTHWHILE = 0.999
"""What is not faster than so many times the best is not sought."""
RIVAL = 1.05
"""A run that holds the model in another way may be so many times as slow, and still bear disturbances better."""
HOPELESS = 1.25
"""A candidate whose second step takes so many times the step of the best ones is not simulated to its end."""
FINALISTS = 2
"""Of each kind, simulated rank by rank."""
MOST_FINALISTS = 10
"""... while the quick steps of others promise more than the exact ones found."""
ROUNDS = 4
"""The neighbourhood of the best is searched so often."""


class PlanError(ValueError):
    """Nothing fits."""


@dataclass(frozen=True)
class Plan:
    """Outcomes, best first, and the best of each kind."""

    costing: Costing
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
        fixed: choices that are not the planner's: fields of `Candidate` and of `ScheduleSpec`.
        asynchronous: one-step asynchrony may be chosen.

    Raises:
        PlanError: no candidate fits; says what is missing where.
    """
    with _collecting_nothing():
        return _make_plan(costing, steps, fixed or {}, asynchronous)


@contextmanager
def _collecting_nothing() -> Iterator[None]:
    """A plan leaves no cycles behind, and makes so many objects that looking for some is a sixth of its work."""
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
        """Outcomes, best first, of those `known` and of the candidates that fit and might beat them, the lowest floors
        first. Ways to hold the model do not compete here: the fewer wait for each other, the better they bear
        disturbances."""
        found = {outcome.candidate: outcome for outcome in known}
        fitting = [
            candidate
            for candidate in dict.fromkeys(_fixed(costing, candidates, fixed))
            if not costing.misfits(candidate)
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
                hopeless = HOPELESS * best[-1] if len(best) == FINALISTS else math.inf
                seen[candidate] = evaluate(costing, candidate, bound, hopeless=hopeless)
            found[candidate] = seen[candidate]
        return sorted(found.values(), key=lambda outcome: outcome.expected_s)

    coarse = [colocated(costing)] if not fixed.get("rollouts") else []
    if fixed.get("rollouts") != 0:
        numbers = {int(fixed["trainers"])} if "trainers" in fixed else None
        for async_steps in range(1 + asynchronous):
            candidates = _fixed(costing, disaggregated(costing, async_steps, numbers), fixed)
            coarse.append(iter(promising(costing, candidates)))
    on_policy = math.inf
    """Seconds of the fastest on-policy run: around others, only what might beat it is sought."""
    for candidates in coarse:
        best = tried(candidates)
        for _ in range(ROUNDS):
            around = [near for outcome in _centres(best) for near in neighbours(costing, outcome.candidate)]
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
    """The steady ones first, by the robust step, and before those that are much slower than others when nothing
    disturbs them. Asynchronous runs may be left out afterwards, so on-policy ones are compared with their like."""
    settled = [outcome for outcome in outcomes if outcome.settled]

    def slow(outcome: Outcome) -> bool:
        alike = (o.step_s for o in settled if o.candidate.spec.async_steps <= outcome.candidate.spec.async_steps)
        return outcome.step_s > RIVAL * min(alike, default=math.inf)

    return sorted(outcomes, key=lambda outcome: (not outcome.settled, slow(outcome), outcome.robust_s))


def _rivals(ranked: list[Outcome]) -> dict[str, float]:
    """Way to hold the model -> seconds of its best run, where others are not much faster."""
    fastest = {outcome.candidate.sharding: outcome.expected_s for outcome in reversed(ranked)}
    return {held: seconds for held, seconds in fastest.items() if seconds <= RIVAL * min(fastest.values())}


def _centres(ranked: list[Outcome]) -> list[Outcome]:
    """The best of `ranked` with lending and without, of each way to hold the model and each pool first."""
    kinds: dict[tuple[bool, str, str | None], list[Outcome]] = {}
    for outcome in ranked:
        candidate = outcome.candidate
        kinds.setdefault((candidate.spec.tag, candidate.sharding, candidate.first), []).append(outcome)
    return [outcome for kind in kinds.values() for outcome in kind[:NEAR]]


def _contenders(ranked: list[Outcome]) -> list[Outcome]:
    """`ranked`, the best of each fragment size and way to hold the model first: quick simulations are off alike where
    these are alike."""
    kinds: dict[tuple[str, int], list[Outcome]] = {}
    for outcome in ranked:
        kinds.setdefault((outcome.candidate.sharding, outcome.candidate.spec.gap), []).append(outcome)
    return [own[0] for own in kinds.values()] + [outcome for own in kinds.values() for outcome in own[1:]]


def _fixed(costing: Costing, candidates: Iterable[Candidate], fixed: Mapping[str, Any]) -> Iterator[Candidate]:
    """`candidates` with the choices that are not the planner's, and steps per forward that fit with these."""
    for candidate in candidates:
        changed = candidate.but(**fixed) if fixed else candidate
        if not allowed(costing, changed):
            continue
        if changed != candidate and "tsp_batch" not in fixed:
            changed = (fitted(costing, changed) or changed).but(**fixed)
        yield changed


def sync_run(costing: Costing, gpus: int) -> Outcome | None:
    """What `schedule=sync` does with `gpus` GPUs at its best split: nothing overlaps, one denoising step a forward."""
    found = []
    for trainers, sharding in itertools.product(range(1, gpus), ("ddp", "hsdp", "fsdp")):
        candidate = costing.candidate(trainers, gpus - trainers, sharding=sharding, gap=0, tsp_shard=False)
        if allowed(costing, candidate) and not costing.misfits(candidate):
            found.append(candidate)
    return fastest(costing, found, costing.bound())


def fastest(costing: Costing, candidates: Iterable[Candidate], bound: Bound) -> Outcome | None:
    """The best of `candidates`, those of the lowest floors first: what cannot beat the best so far is not simulated."""
    floors = {candidate: costing.floor(candidate) for candidate in dict.fromkeys(candidates)}
    best: Outcome | None = None
    for candidate, floor in sorted(floors.items(), key=lambda item: item[1]):
        if best is not None and floor >= best.step_s:
            break
        outcome = evaluate(costing, candidate, bound)
        best = outcome if best is None or outcome.step_s < best.step_s else best
    return best


def _why_nothing(costing: Costing) -> str:
    """Why even the smallest candidates cannot run: colocated, and half of the GPUs in either role."""
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
        if trial.trainers and allowed(costing, trial)
    ]
    if not reasons:
        roles = ", ".join(f"{pool.name}: {pool.count} {pool.role}" for pool in pools)
        return f"the pools' roles leave no GPU to train ({roles}): set the role of one of them to auto or trainer."
    remedy = "Use more or larger GPUs, LoRA, a smaller resolution or fewer frames."
    return f"nothing fits: {'; '.join(reasons)}. {remedy}"
