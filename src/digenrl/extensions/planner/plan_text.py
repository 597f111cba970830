"""Show a plan as text and as JSON."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from digenrl.extensions.planner.bound import seconds_per_unit, work_units
from digenrl.extensions.planner.candidate import Candidate
from digenrl.extensions.planner.costing import gradient_refusal
from digenrl.extensions.planner.evaluation import evaluation_seconds, trainers_evaluate
from digenrl.extensions.planner.outcome import SLOWER_GENERATION, CandidateOutcome, Limit
from digenrl.extensions.planner.planner import Plan, smallest_split
from digenrl.extensions.planner.workload import BASE_BYTES, Drawn
from digenrl.hardware import Hardware
from digenrl.recompute import AUTO, Recompute

EXPLAINED = 2.0
"""Factor on the best step time. In plan.json slower candidates have no `limits`, which take six
simulations each; the best of a kind always has them."""
MOST_SHARES = 8
"""Trainers up to which a command lists the share of each."""
COLUMNS = 100
"""Width of what a plan prints."""
NEAR_DUPLICATE = 0.01
"""Relative difference of step times below which two candidates of one schedule are shown as one."""


class CandidateRecord(TypedDict):
    """A candidate in plan.json."""

    overrides: list[str]
    """Words of a command line that run it."""
    schedule: str
    async_steps: int
    trainers: int
    rollouts: int
    step_s: float
    samples_per_s: float
    bound_step_s: float
    efficiency: float
    settled: bool
    simulated_steps: int
    jitter_step_s: float
    slow_rank_step_s: float
    robust_step_s: float
    messages: list[str]
    memory_gib: dict[str, float]
    """Role -> GiB of its fullest rank."""
    host_gib: dict[str, float]
    """Pool -> GiB of its fullest node."""
    recompute: dict[str, bool | str | dict[str, float]]
    """Pool -> value of `model.gradient_checkpointing`."""
    bubble: dict[str, float]
    """Cause -> share of all GPU time."""
    limits: list[Limit]


class Sensitivity(TypedDict):
    """The winner, and the best candidate, if denoising took `factor` times as long as assumed."""

    factor: float
    step_s: float
    best: str
    best_step_s: float


class PlanRecord(TypedDict):
    """What plan.json holds."""

    candidates: list[CandidateRecord]
    configured: CandidateRecord | None
    """The run that the configuration describes."""
    refused: str
    best: dict[str, CandidateRecord | None]
    """colocated, on_policy and async -> the best of this kind."""
    pools: dict[str, int]
    work: dict[str, float]
    """Stage -> units of work in an RL step."""
    seconds_per_unit: dict[str, dict[str, float | None]]
    """Stage -> pool -> seconds; None where the pool cannot do the stage."""
    sources: dict[str, dict[str, str]]
    """Stage -> pool -> measured, published or assumed."""
    sensitivity: Sensitivity
    bound_step_s: float
    gpu_hours: float
    hours: float
    price: float | None
    rl_steps: int
    simulated: int
    """Number of simulated candidates."""
    step_s_without_pool: NotRequired[dict[str, float] | None]
    """Name of a pool without which the winner is faster -> seconds per step then."""


def train_words(outcome: CandidateOutcome) -> list[str]:
    """Return the words that run the candidate with `digenrl train experiment=... hardware=...`."""
    candidate, hardware = outcome.candidate, outcome.costing.hardware
    words = [
        f"allocation.trainers={candidate.trainers}",
        f"allocation.rollouts={candidate.rollouts}",
        f"parallel.sharding={candidate.sharding}",
        f"parallel.context={candidate.spec.context}",
        f"sampling.task_size={candidate.spec.task_size}",
        f"model.gradient_checkpointing={_recompute_word(candidate.recompute)}",
        f"model.offload_encoders={str(not candidate.encoders).lower()}",
        f"schedule.claims={'split' if candidate.static_claims else 'shared'}",
        "schedule.auto=false",
        *quantize_words(outcome),
        *outcome.costing.schedule_spec(candidate).override_words(),
    ]
    if candidate.sharding == "ddp" and candidate.trainers > MOST_SHARES:
        # The profile's speeds, which are these shares, are what measured ones begin with.
        words = [
            "schedule.shares=measured" if word.startswith("schedule.shares=[") else word
            for word in words
        ]
    if candidate.first is not None and candidate.rollouts:
        first = hardware.find_pool(candidate.first)
        if candidate.trainers >= first.count:
            words.append(f"hardware.pools.{first.name}.role=trainer")
        if candidate.trainers <= first.count:
            others = [pool.name for pool in hardware.pools if pool.name != first.name]
            words += [f"hardware.pools.{name}.role=rollout" for name in others]
    return words


def evaluation_words(outcome: CandidateOutcome, drawn: Drawn | None) -> list[str]:
    """Return the word that lets trainers evaluate, in a list; an empty list where rollouts do, or
    nobody could choose."""
    if drawn is None or trainers_evaluate(outcome.costing, drawn, outcome.candidate) is None:
        return []
    return ["allocation.evaluation=trainers"]


def quantize_words(outcome: CandidateOutcome) -> list[str]:
    """Return the word that quantizes the frozen base, in a list; an empty list if it has 16
    bits."""
    size = outcome.costing.work.base_bytes
    return [f"model.quantize={kind}" for kind, each in BASE_BYTES.items() if kind and each == size]


def _recompute_word(recompute: Recompute | None) -> str:
    """Return the value of `model.gradient_checkpointing` on a command line; None becomes `auto`."""
    value = AUTO if recompute is None else recompute.config
    if isinstance(value, dict):
        return f"{{{','.join(f'{mode}:{share}' for mode, share in value.items())}}}"
    return str(value).lower()


def candidate_entry(outcome: CandidateOutcome, explained: bool = True) -> CandidateRecord:
    """Return one candidate's entry in plan.json; its `limits` are empty if not `explained`."""
    return {
        "overrides": train_words(outcome),
        "schedule": outcome.candidate.name,
        "async_steps": outcome.candidate.spec.async_steps,
        "trainers": outcome.candidate.trainers,
        "rollouts": outcome.candidate.rollouts,
        "step_s": outcome.step_s,
        "samples_per_s": outcome.costing.work.samples / outcome.step_s,
        "bound_step_s": outcome.bound_s,
        "efficiency": outcome.efficiency,
        "settled": outcome.settled,
        "simulated_steps": len(outcome.result.step_ends),
        "jitter_step_s": outcome.jitter_s,
        "slow_rank_step_s": outcome.slow_rank_s,
        "robust_step_s": outcome.robust_s,
        "messages": list(outcome.result.messages),
        "memory_gib": memory_by_role(outcome),
        "host_gib": {
            pool: round(gib, 3) for pool, gib in outcome.costing.host_gib(outcome.candidate).items()
        },
        "recompute": {pool: kept.config for pool, kept in recompute_by_pool(outcome).items()},
        "bubble": outcome.bubble,
        "limits": outcome.limits if explained else [],
    }


def memory_by_role(outcome: CandidateOutcome) -> dict[str, float]:
    """Return role -> GiB of its fullest rank."""
    table: dict[str, float] = {}
    for (_, role), use in outcome.costing.rank_memory(outcome.candidate).items():
        table[role] = max(table.get(role, 0.0), round(use.gib, 3))
    return table


def recompute_by_pool(outcome: CandidateOutcome) -> dict[str, Recompute]:
    """Return pool of trainers -> what their blocks keep for the backward pass."""
    costing, candidate = outcome.costing, outcome.candidate
    return {
        pool.name: costing.choose_recompute(candidate, pool)
        for pool, _ in costing.place_ranks(candidate).trainers_by_pool
    }


def recompute_text(outcome: CandidateOutcome) -> str:
    """Return a table cell for recomputation: `no`, shares of blocks with what they compute again,
    or `by pool`."""
    kept = set(recompute_by_pool(outcome).values())
    if len(kept) > 1:
        return "by pool"
    shares = {mode: share for mode, share in kept.pop().shares.items() if share > 0}
    words = {"products": "p", "attention": "a", "inputs": "all"}
    return (
        "+".join(
            f"{100 * shares[mode]:.0f}%{word}" for mode, word in words.items() if mode in shares
        )
        or "no"
    )


def eligible_outcomes(plan: Plan, asynchronous: bool) -> list[CandidateOutcome]:
    """Return the candidates that the plan may choose from, best first."""
    return [
        outcome
        for outcome in plan.outcomes
        if asynchronous or outcome.candidate.spec.async_steps == 0
    ]


def as_json(
    plan: Plan, asked: CandidateOutcome | None, refused: str, asynchronous: bool, booking: Booking
) -> PlanRecord:
    """Return plan.json: the ranked candidates, the run's cost, and the numbers to recompute the
    bound from.

    `asked` is the run that the configuration describes. `refused` says why `train` would refuse it,
    and what would run instead.
    """
    costing = plan.costing
    best = {kind: plan.best_of_kind(kind) for kind in ("colocated", "on_policy", "async")}
    ranked = eligible_outcomes(plan, asynchronous)
    slow = EXPLAINED * ranked[0].step_s
    return {
        "candidates": [candidate_entry(outcome, outcome.step_s <= slow) for outcome in ranked],
        "configured": None if asked is None else candidate_entry(asked),
        "refused": refused,
        "best": {
            kind: candidate_entry(outcome) if outcome else None for kind, outcome in best.items()
        },
        "pools": {pool.name: pool.count for pool in costing.hardware.pools},
        "work": work_units(costing.work),
        "seconds_per_unit": seconds_per_unit(costing),
        "sources": costing.costs.figure_sources(),
        "sensitivity": generation_sensitivity(plan, asynchronous),
        "bound_step_s": plan.bound_s,
        "gpu_hours": booking.gpu_hours(ranked[0]),
        "hours": booking.run_hours(ranked[0]),
        "price": booking.run_price(ranked[0]),
        "rl_steps": booking.rl_steps,
        "simulated": plan.simulated,
    }


@dataclass(frozen=True)
class Booking:
    """Length of a run, its evaluations, and the price of a GPU hour."""

    rl_steps: int
    price_per_gpu_hour: float | None = None
    evaluations: int = 0
    drawn: Drawn | None = None
    """Samples that each evaluation draws; None = no evaluations."""

    def run_hours(self, outcome: CandidateOutcome) -> float:
        """Return the hours of the whole run, including its evaluations."""
        seconds = self.rl_steps * outcome.step_s
        if (
            self.drawn is not None
        ):  # the last evaluation overlaps with no training, so all of its time counts
            seconds += (self.evaluations - 1) * outcome.evaluation_s(self.drawn)
            last = outcome.rollouts_evaluate(self.drawn)
            seconds += evaluation_seconds(outcome.costing, self.drawn, outcome.candidate, last)
        return seconds / 3600

    def gpu_hours(self, outcome: CandidateOutcome) -> float:
        """Return the GPU-hours of the run. All GPUs of the profile are booked."""
        return self.run_hours(outcome) * outcome.costing.hardware.booked

    def run_price(self, outcome: CandidateOutcome) -> float | None:
        """Return the cost of the run in the currency of the price; None if no price is given."""
        return (
            None
            if self.price_per_gpu_hour is None
            else self.gpu_hours(outcome) * self.price_per_gpu_hour
        )


def generation_sensitivity(plan: Plan, asynchronous: bool) -> Sensitivity:
    """Return the winner's step if denoising took 20% longer than assumed, and the best candidate
    then."""
    ranked = eligible_outcomes(plan, asynchronous)
    best = min(ranked, key=lambda outcome: outcome.slower_generation_s)
    return {
        "factor": SLOWER_GENERATION,
        "step_s": ranked[0].slower_generation_s,
        "best": run_label(best),
        "best_step_s": best.slower_generation_s,
    }


def run_label(outcome: CandidateOutcome) -> str:
    """Return the schedule and its split of the ranks, such as `sync 2+6`."""
    candidate = outcome.candidate
    return f"{candidate.name} {candidate.trainers}+{candidate.rollouts}"


def booking_lines(plan: Plan, asynchronous: bool, booking: Booking) -> list[str]:
    """Return lines that say what to book and what it costs."""
    winner = eligible_outcomes(plan, asynchronous)[0]
    costing, hardware = plan.costing, plan.costing.hardware
    gpus = ", ".join(f"{pool.count + pool.judges} x {pool.gpu}" for pool in hardware.pools)
    price = booking.run_price(winner)
    money = "" if price is None else f", {price:,.0f} at {booking.price_per_gpu_hour:g} a GPU-hour"
    drawn = booking.drawn
    by_rollouts = drawn is not None and winner.rollouts_evaluate(drawn)
    evaluators = "rollouts" if by_rollouts else "trainers"
    lines = [
        f"Book {gpus} for {booking.run_hours(winner):.1f} hours ({booking.rl_steps} RL steps and "
        f"{booking.evaluations} evaluations by {evaluators}): "
        f"{booking.gpu_hours(winner):,.0f} GPU-hours{money}.",
        f"Run {' with '.join([run_label(winner), *quantize_words(winner)])}: "
        f"{winner.step_s:.2f} s per step; {winner.jitter_s:.2f} s if durations vary by 5%, "
        f"{winner.slow_rank_s:.2f} s if one rank is 15% slower.",
    ]
    if judges := hardware.booked - hardware.gpus:
        lines.append(
            f"Judges ({', '.join(costing.work.judged)}) hold {judges} of these GPUs and take "
            f"{costing.costs.judged_seconds():.2f} s for the samples of a step, beside the ranks."
        )
    found = generation_sensitivity(plan, asynchronous)
    better = f", and {found['best']} would be best ({found['best_step_s']:.2f} s)"
    other = "" if found["best"] == run_label(winner) else better
    lines.append(f"If rollouts are 20% slower than assumed: {found['step_s']:.2f} s{other}.")
    if costing.work.engine == "eager" and costing.work.compiles:
        lines.append(f"With model.compile=true (not yet run on a GPU): {winner.compiled_s:.2f} s.")
    words: dict[str, list[str]] = {}
    for stage, by_pool in plan.costing.costs.figure_sources().items():
        for source in sorted(set(by_pool.values())):
            where = [pool for pool, word in by_pool.items() if word == source]
            name = stage if len(where) == len(by_pool) else f"{stage} on {'+'.join(where)}"
            words.setdefault(source, []).append(name)
    speeds = "; ".join(f"{source}: {', '.join(names)}" for source, names in sorted(words.items()))
    lines.append(f"Speeds: {speeds}.")
    return lines + [f"In the simulation {message}" for message in winner.result.messages]


def candidate_table(
    plan: Plan,
    asynchronous: bool,
    booking: Booking,
    show: int,
    asked: CandidateOutcome | None = None,
) -> list[str]:
    """Return a table of the best candidates without near-duplicates, and of the configured run."""
    lines = [
        f"{'schedule':<17}{'ranks':>8}{'shard':>6}{'task':>5}{'steps':>6}{'gap':>4}{'recompute':>13}"
        f"{'GiB T/R':>10}{'s/step':>9}{'slow':>8}{'bound':>6}{'GPU-h':>7}"
    ]
    candidates = 0
    shown: dict[tuple[str, str], list[float]] = {}
    for outcome in eligible_outcomes(plan, asynchronous):
        near = shown.setdefault((outcome.candidate.name, outcome.candidate.sharding), [])
        if candidates < show and all(
            abs(outcome.step_s / other - 1) > NEAR_DUPLICATE for other in near
        ):
            near.append(outcome.step_s)
            candidates += 1
            lines += _candidate_lines(outcome, booking)
    return lines if asked is None else [*lines, *_candidate_lines(asked, booking, "as configured")]


def _candidate_lines(
    outcome: CandidateOutcome, booking: Booking, name: str | None = None
) -> list[str]:
    candidate, memory = outcome.candidate, memory_by_role(outcome)
    gib = f"{memory['trainer']:.1f}/" + (f"{memory['rollout']:.1f}" if "rollout" in memory else "-")
    waits = sorted(outcome.bubble.items(), key=lambda item: -item[1])
    bubble = ", ".join(f"{cause} {100 * share:.1f}%" for cause, share in waits if share >= 0.001)
    settled = "" if outcome.settled else "; does not settle"
    figures = (
        f"{name or candidate.name:<17}{f'{candidate.trainers}+{candidate.rollouts}':>8}"
        f"{candidate.sharding:>6}{candidate.spec.task_size:>5}{candidate.spec.tsp_batch:>6}"
        f"{candidate.spec.gap:>4}{recompute_text(outcome):>13}{gib:>10}{outcome.step_s:>9.2f}"
        f"{max(outcome.jitter_s, outcome.slow_rank_s):>8.1f}{outcome.efficiency:>6.2f}"
        f"{booking.gpu_hours(outcome):>7.0f}"
    )
    rest = f"waiting: {bubble or 'none'}{_unusual_choices(candidate)}{settled}"
    return [figures, *wrap_text(rest, "    ")]


def wrap_text(text: str, indent: str = "") -> list[str]:
    """Return a text in lines of at most `COLUMNS` columns, all of them behind `indent`, or the
    later ones where that is empty."""
    later = indent or "  "
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=indent,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _unusual_choices(candidate: Candidate) -> str:
    """Return words for unusual choices that have no column of their own."""
    words = {
        f"trainers first from {candidate.first}": candidate.first is not None,
        "encoders stay on the GPU": candidate.encoders,
        f"stale {candidate.spec.stale_fraction:g}": candidate.spec.async_steps > 0,
        "lends": candidate.spec.async_steps > 0 and candidate.spec.tag,
        f"tokens over {candidate.spec.context} trainers": candidate.spec.context > 1,
        "steps not sharded": not candidate.spec.tsp_shard and candidate.rollouts > 0,
    }
    return "".join(f"; {word}" for word, on in words.items() if on)


def asynchronous_line(plan: Plan, other: CandidateOutcome | None, chosen: bool) -> str:
    """Return what one-step asynchrony gives beside the best colocated run, and at which price.

    Args:
        other: the best asynchronous run; None: none fits.
        chosen: whether the plan may choose it.
    """
    colocated = plan.best_of_kind("colocated")
    if other is None:
        return "With one-step asynchrony: nothing fits, or nothing is left to overlap."
    ratio = (
        "" if colocated is None else f", {colocated.step_s / other.step_s:.2f} x the best colocated"
    )
    how = "" if chosen else " Its command: the same words with plan.async=true."
    return (
        f"With one-step asynchrony: {run_label(other)}, {other.step_s:.2f} s per "
        f"step{ratio}. On the digits the held-out judge lost .001 to .010 by it "
        f"(benchmarks/results/learning_async.md).{how}"
    )


def changes_line(hardware: Hardware) -> str:
    """Return what would make splitting pay, of what the profile does not have already."""
    equal = len({(pool.gpu, pool.memory_gib) for pool in hardware.pools}) == 1
    return (
        f"What changes the answer: {'unequal GPUs, ' * equal}weights that generate only when "
        "sharded, rewards on processors, GPUs that may be taken away (docs/planner.md, When "
        "splitting pays)."
    )


def _split_refusal(plan: Plan) -> str | None:
    """Return why a run refuses every split of the ranks; None: it does not, or roles do."""
    split = smallest_split(plan.costing)
    return None if split is None else gradient_refusal(plan.costing, split)


def explain_winner(plan: Plan, asynchronous: bool) -> list[str]:
    """Return two lines about the winner; they say so when a colocated run wins."""
    ranked = eligible_outcomes(plan, asynchronous)
    winner = ranked[0]
    colocated = plan.best_of_kind("colocated")
    limits = [limit for limit in winner.limits if limit["seconds"] > 0][:3]
    causes = (
        ", ".join(f"{limit['cause']} {limit['seconds']:.2f} s" for limit in limits) or "nothing"
    )
    if winner.candidate.rollouts == 0:
        split = next((outcome for outcome in ranked if outcome.candidate.rollouts), None)
        tried = "no disaggregated run fits"
        if split is not None:
            tried = f"the best disaggregated run tried takes {split.step_s:.2f} s"
        elif (refusal := _split_refusal(plan)) is not None:
            tried = f"no disaggregated run is accepted ({refusal})"
        why = f"Colocated wins: {tried}. Splitting does not pay here."
    elif colocated is None:
        why = "Disaggregated, because no colocated run fits into memory, or none was asked for."
    else:
        ratio = colocated.step_s / winner.step_s
        why = f"Disaggregated: {ratio:.2f}x the best colocated run ({colocated.step_s:.2f} s)"
        why += (
            "."
            if ratio >= 1
            else f", {colocated.robust_s / winner.robust_s:.2f}x with jitter or a slow rank."
        )
    return [
        f"{winner.step_s:.2f} s per step, {100 * winner.efficiency:.1f}% of the bound "
        f"({plan.bound_s:.2f} s); what separates them: {causes}.",
        why,
    ]
