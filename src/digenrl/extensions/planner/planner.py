"""Search for the fastest run: enumerate candidates, drop those that exceed memory, simulate the
rest, rank them.

Candidates differ in allocation (colocated or disaggregated), roles of pools, task size, fragment
size, steps per forward (K), sharding, lending and asynchrony. A coarse pass covers the choices that
matter most: roles, sharding and task size. A fine pass then searches around the best candidates of
each kind.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from digenrl.extensions.planner.bound import step_bound
from digenrl.extensions.planner.candidate import Candidate, Choices
from digenrl.extensions.planner.costing import Costing, gradient_refusal, travelling_share
from digenrl.extensions.planner.enumeration import (
    colocated_candidates,
    disaggregated_candidates,
    fit_candidate,
    is_allowed,
    neighbour_candidates,
    promising_candidates,
    task_sizes,
)
from digenrl.extensions.planner.floor import busiest_seconds
from digenrl.extensions.planner.outcome import COARSE_RANKS, CandidateOutcome, simulate_candidate
from digenrl.extensions.planner.virtual_cluster import coarsen_run
from digenrl.garbage import no_garbage

NEAR = 4
"""Candidates of each kind whose neighbours are tried. A kind is given by lending, sharding, and the
first pool of trainers."""
WORTHWHILE = 0.999
"""Factor on the best step time that a new candidate must beat to be worth a simulation."""
RIVAL = 1.05
"""Factor on the best step time up to which candidates with other sharding stay in the search,
because they may bear disturbances better."""
CUTOFF = 1.125
"""Factor on the best step times. A candidate whose second step takes longer is not simulated to its
end."""
FINALISTS = 2
"""Candidates of each kind that are simulated rank by rank."""
MOST_FINALISTS = 10
"""Most candidates of each kind that are simulated rank by rank, while further quick results look
better than the exact ones."""
ROUNDS = 4
"""Most rounds of searching around the best candidates."""


class PlanError(ValueError):
    """No candidate fits."""


@dataclass(frozen=True)
class Plan:
    """Result of a search: the outcomes, best first, and the bound."""

    costing: Costing
    bound_s: float
    outcomes: tuple[CandidateOutcome, ...]
    simulated: int

    def best_of_kind(self, kind: str) -> CandidateOutcome | None:
        """Return the best outcome of a kind (colocated | on_policy | async), or None."""
        tests = {
            "colocated": lambda c: c.rollouts == 0,
            "on_policy": lambda c: c.spec.async_steps == 0,
            "async": lambda c: c.spec.async_steps == 1,
        }
        return next((outcome for outcome in self.outcomes if tests[kind](outcome.candidate)), None)


@no_garbage()
def make_plan(
    costing: Costing,
    steps: int | None = None,
    fixed: Choices | None = None,
    asynchronous: bool = True,
) -> Plan:
    """Search for the fastest way to run `costing`.

    Args:
        steps: RL steps of each finalist's simulation; None = until its step no longer changes.
        fixed: choices that the user made; None: none.
        asynchronous: whether one-step asynchrony may be chosen.

    Raises:
        PlanError: no candidate fits. The message says how much memory is missing, and where.
    """
    bound_s, fixed = step_bound(costing), fixed or {}
    seen: dict[Candidate, CandidateOutcome] = {}
    finalists: dict[Candidate, CandidateOutcome] = {}

    def try_candidates(
        candidates: Iterable[Candidate], known: Iterable[CandidateOutcome] = ()
    ) -> list[CandidateOutcome]:
        """Simulate the candidates that fit and might beat the `known` outcomes; return all of them,
        best first.

        Candidates with low floors come first. Each kind of sharding competes with its like only: a
        slightly slower run in which fewer ranks wait for each other may bear disturbances better.
        """
        found = {outcome.candidate: outcome for outcome in known}
        fitting = [
            candidate
            for candidate in dict.fromkeys(_apply_choices(costing, candidates, fixed))
            if not costing.find_misfits(candidate)
        ]
        for candidate in sorted(fitting, key=costing.step_floor):
            if candidate not in seen:
                best = sorted(outcome.expected_s for outcome in found.values())[:FINALISTS]
                alike = (
                    o.expected_s
                    for o in found.values()
                    if o.candidate.sharding == candidate.sharding
                )
                rival = RIVAL * min(best, default=math.inf)
                limits = [WORTHWHILE * min(alike, default=math.inf), rival]
                if known and not candidate.spec.async_steps:
                    limits.append(on_policy)
                # A rival that is no faster may still have neighbours that are.
                if (
                    costing.step_floor(candidate) >= min(limits)
                    or _quick_step_floor(costing, candidate) >= rival
                ):
                    continue
                cutoff_s = CUTOFF * best[-1] if len(best) == FINALISTS else math.inf
                seen[candidate] = simulate_candidate(costing, candidate, bound_s, cutoff_s=cutoff_s)
            found[candidate] = seen[candidate]
        return sorted(found.values(), key=lambda outcome: outcome.expected_s)

    on_policy = math.inf
    """Seconds per step of the fastest on-policy run. Neighbours of on-policy runs must have a lower
    floor."""
    for candidates in _first_candidates(costing, fixed, asynchronous):
        best = try_candidates(candidates)
        for number in range(ROUNDS):
            # A kind that its neighbours brought nowhere near the best is left.
            centres = [
                o.candidate
                for o in _search_centres(best)
                if not number or o.expected_s <= RIVAL * best[0].expected_s
            ]
            around = [near for centre in centres for near in neighbour_candidates(costing, centre)]
            before, best = _rival_seconds(best), try_candidates(around, best)
            if all(
                seconds >= WORTHWHILE * before.get(held, math.inf)
                for held, seconds in _rival_seconds(best).items()
            ):
                break
        replayed: list[CandidateOutcome] = []
        finalists_of_kind = FINALISTS if not best or best[0].expected_s <= RIVAL * on_policy else 1
        for outcome in _order_contenders(best):
            steady = [other.step_s for other in replayed if other.settled]
            enough = len(steady) >= finalists_of_kind and outcome.expected_s >= min(steady)
            enough = enough or len(replayed) == MOST_FINALISTS
            if enough or outcome.expected_s > RIVAL * best[0].expected_s:
                continue
            exact = outcome
            if outcome.coarse or steps is not None or not outcome.settled:
                exact = simulate_candidate(
                    costing, outcome.candidate, bound_s, exact=True, steps=steps
                )
            replayed.append(replace(exact, quick_s=outcome.step_s))
        finalists |= {outcome.candidate: outcome for outcome in replayed}
        if best and not best[0].candidate.spec.async_steps:
            on_policy = min(on_policy, best[0].expected_s)
    if not seen:
        raise PlanError(_why_nothing(costing))
    return Plan(costing, bound_s, tuple(_rank_outcomes(finalists.values())), len(seen))


def _first_candidates(
    costing: Costing, fixed: Choices, asynchronous: bool
) -> Iterator[Iterable[Candidate]]:
    """Yield where the search begins: colocated runs, then splits of each asynchrony."""
    if not fixed.get("rollouts"):
        yield colocated_candidates(costing)
    if fixed.get("rollouts") != 0:
        numbers = {fixed["trainers"]} if "trainers" in fixed else None
        for async_steps in range(1 + asynchronous):
            candidates = _apply_choices(
                costing, disaggregated_candidates(costing, async_steps, numbers), fixed
            )
            yield promising_candidates(costing, candidates)


def _quick_step_floor(costing: Costing, candidate: Candidate) -> float:
    """Return a lower bound of the quick simulation's step that `Costing.step_floor` does not
    imply."""
    spec, cluster = coarsen_run(
        costing.schedule_spec(candidate), costing.build_cluster(candidate), COARSE_RANKS
    )
    return 0.0 if cluster.lockstep else busiest_seconds(spec, cluster)


def _rank_outcomes(outcomes: Collection[CandidateOutcome]) -> list[CandidateOutcome]:
    """Sort outcomes: settled before unsettled, then by `robust_s`.

    Runs that are more than `RIVAL` times as slow as the fastest come after the others. On-policy
    runs are compared with on-policy runs only, because asynchronous ones may be left out
    afterwards. `robust_s` takes three simulations, so a run without another of its class goes
    without.
    """
    settled = [outcome for outcome in outcomes if outcome.settled]

    def outcome_class(outcome: CandidateOutcome) -> tuple[bool, bool]:
        alike = (
            o.step_s
            for o in settled
            if o.candidate.spec.async_steps <= outcome.candidate.spec.async_steps
        )
        return not outcome.settled, outcome.step_s > RIVAL * min(alike, default=math.inf)

    ranked: list[CandidateOutcome] = []
    for _, own in itertools.groupby(sorted(outcomes, key=outcome_class), key=outcome_class):
        alike = list(own)
        ranked += sorted(alike, key=lambda o: o.robust_s) if len(alike) > 1 else alike
    return ranked


def _rival_seconds(ranked: list[CandidateOutcome]) -> dict[str, float]:
    """Return sharding -> seconds of its best run, without those slower than `RIVAL` times the
    best."""
    fastest = {outcome.candidate.sharding: outcome.expected_s for outcome in reversed(ranked)}
    return {
        held: seconds
        for held, seconds in fastest.items()
        if seconds <= RIVAL * min(fastest.values())
    }


def _search_centres(ranked: list[CandidateOutcome]) -> list[CandidateOutcome]:
    """Return the `NEAR` best of each kind, given by lending, sharding and first pool of
    trainers."""
    kinds: dict[tuple[bool, str, str | None], list[CandidateOutcome]] = {}
    for outcome in ranked:
        candidate = outcome.candidate
        kinds.setdefault((candidate.spec.tag, candidate.sharding, candidate.first), []).append(
            outcome
        )
    return [outcome for kind in kinds.values() for outcome in kind[:NEAR]]


def _order_contenders(ranked: list[CandidateOutcome]) -> list[CandidateOutcome]:
    """Reorder `ranked`: first the best of each fragment size and sharding, then the others.

    Quick simulations of equal fragment size and sharding have similar errors, so the exact ones
    should cover each.
    """
    kinds: dict[tuple[str, int], list[CandidateOutcome]] = {}
    for outcome in ranked:
        kinds.setdefault((outcome.candidate.sharding, outcome.candidate.spec.gap), []).append(
            outcome
        )
    return [own[0] for own in kinds.values()] + [
        outcome for own in kinds.values() for outcome in own[1:]
    ]


def _apply_choices(
    costing: Costing, candidates: Iterable[Candidate], fixed: Choices
) -> Iterator[Candidate]:
    """Yield `candidates` with the user's choices, and with steps per forward that fit these
    choices."""
    for candidate in candidates:
        changed = candidate.with_changes(**fixed) if fixed else candidate
        if not is_allowed(costing, changed):
            continue
        if changed != candidate and "tsp_batch" not in fixed:
            changed = (fit_candidate(costing, changed) or changed).with_changes(**fixed)
        yield changed


def sync_run(costing: Costing, gpus: int) -> CandidateOutcome | None:
    """Return the outcome of `schedule=sync` on `gpus` GPUs at its best split.

    Nothing overlaps, and a forward trains a single denoising step.
    """
    every = (
        costing.make_candidate(trainers, gpus - trainers, sharding=sharding, gap=0, tsp_shard=False)
        for trainers, sharding in itertools.product(range(1, gpus), ("ddp", "hsdp", "fsdp"))
    )
    found = (c for c in every if is_allowed(costing, c) and not costing.find_misfits(c))
    return find_fastest(costing, found, step_bound(costing))


def find_fastest(
    costing: Costing, candidates: Iterable[Candidate], bound_s: float
) -> CandidateOutcome | None:
    """Return the fastest of `candidates`. A candidate whose floor exceeds the best so far is not
    simulated."""
    best: CandidateOutcome | None = None
    for candidate in sorted(dict.fromkeys(candidates), key=costing.step_floor):
        if best is not None and costing.step_floor(candidate) >= best.step_s:
            break
        outcome = simulate_candidate(costing, candidate, bound_s)
        best = outcome if best is None or outcome.step_s < best.step_s else best
    return best


def smallest_split(costing: Costing) -> Candidate | None:
    """Return the split that needs least memory, with about half of the GPUs in each role.

    It is one that a run accepts if there is any, and else one with a `gradient_refusal`. None: the
    pools' roles allow no split.
    """
    gpus, pools = costing.hardware.gpus, costing.hardware.pools
    training, generating = (
        sum(p.count for p in pools if p.role == role) for role in ("trainer", "rollout")
    )
    usual = max(training, min(gpus // 2, gpus - generating))
    refused = None
    for trainers in sorted(range(1, gpus), key=lambda number: abs(number - usual)):
        try:
            split = _smallest_run(costing, trainers, gpus - trainers)
            if gradient_refusal(costing, split) is None:
                return split
        except ValueError:  # the roles of the pools do not allow it
            continue
        refused = refused or split
    return refused


def _smallest_run(costing: Costing, trainers: int, rollouts: int) -> Candidate:
    """Return a candidate whose trainers share the weights if a run accepts that. Raises ValueError
    as `Costing.place_ranks` does."""
    size = task_sizes(costing)[0]
    whole = costing.make_candidate(trainers, rollouts, sharding="fsdp", task_size=size)
    compresses = travelling_share(costing, whole) is not None
    return whole.with_changes(sharding="ddp") if compresses else whole


def _why_nothing(costing: Costing) -> str:
    """Return why even the smallest candidates cannot run: colocated, and split."""
    hardware, split = costing.hardware, smallest_split(costing)
    trials = {}
    if len(hardware.places) == 1 and not any(pool.role == "rollout" for pool in hardware.pools):
        trials["colocated"] = _smallest_run(costing, hardware.gpus, 0)
    if split is not None:
        trials[f"{split.trainers} trainers"] = split
    if not trials:
        roles = ", ".join(f"{pool.name}: {pool.count} {pool.role}" for pool in hardware.pools)
        return (
            f"the pools' roles leave no GPU to train ({roles}): set the role of one of them to "
            "auto or trainer."
        )
    refusals = [gradient_refusal(costing, trial) for trial in trials.values()]
    last = list(trials.values())[-1]
    if all(refusals):
        return f"{refusals[-1]}: {_accepted_exchange(costing, last)}."
    reasons = [
        f"{name}: {refusal or ', '.join(costing.find_misfits(trial))}"
        for (name, trial), refusal in zip(trials.items(), refusals, strict=True)
    ]
    advice = "Use more or larger GPUs, LoRA or smaller samples"
    if last.sharding == "ddp" and len(hardware.places) == 1:
        advice += ", or set parallel.compress=off, so that trainers can share the weights"
    return f"nothing fits: {'; '.join(reasons)}. {advice}."


def _accepted_exchange(costing: Costing, candidate: Candidate) -> str:
    """Return what to do so that a run accepts how the candidate's trainers exchange gradients."""
    shares: tuple[Literal["off", "auto"], ...] = ("off", "auto")
    for share in shares:
        other = Costing(replace(costing.work, gradient_share=share), costing.hardware)
        if gradient_refusal(other, candidate.with_changes(sharding="ddp")) is None:
            return f"set parallel.compress={share}"
    return "train an adapter (model.lora)"
