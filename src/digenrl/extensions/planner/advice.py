"""The planner as the core's `Advisor`: values for `auto` from costs, memory and simulated runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from omegaconf import OmegaConf

from digenrl.advisor import NO_ROOM, Advice, ModelPlacement, PlainAdvisor, named_keys, with_words
from digenrl.config import Composed
from digenrl.config.settings import Settings
from digenrl.extensions.planner.bound import step_bound
from digenrl.extensions.planner.candidate import Candidate
from digenrl.extensions.planner.costing import Costing, gradient_refusal, only_replicas
from digenrl.extensions.planner.emulate import stand_ins
from digenrl.extensions.planner.enumeration import is_allowed
from digenrl.extensions.planner.evaluation import trainers_evaluate
from digenrl.extensions.planner.floor import training_floor
from digenrl.extensions.planner.memory import GIB, USABLE, Memory, rollout_memory
from digenrl.extensions.planner.outcome import CandidateOutcome
from digenrl.extensions.planner.plan_text import explain_winner, train_words
from digenrl.extensions.planner.planner import Plan, PlanError, find_fastest, make_plan, sync_run
from digenrl.extensions.planner.reading import (
    candidate_of,
    costing_of,
    drawn_of,
    fixed_choices,
    has_counted_sizes,
    workload_of,
)
from digenrl.extensions.planner.remedies import find_remedy
from digenrl.hardware import parse_hardware
from digenrl.recompute import AUTO
from digenrl.report.summary_record import Planned
from digenrl.settle import shard_group

NEARLY = 1.05
"""Factor on the fewest seconds per sample up to which `sampling.task_size=auto` takes a size for as
good as the best."""


class PlannerAdvisor:
    """`Advisor` of an installation with the planner. For models without counted sizes it answers as
    `PlainAdvisor`."""

    def task_size(self, composed: Composed, sizes: Sequence[int]) -> int:
        """Return the smallest size that fits and at which a denoising step of a sample takes little
        longer than at the best one, on every pool.

        Small pictures are bound by launches, so that more of them cost nothing. Large ones are
        bound by arithmetic.
        """
        if not has_counted_sizes(composed):
            return PlainAdvisor().task_size(composed, sizes)
        settings = composed.settings
        # Measured seconds belong to one size and say nothing about another. The size must not
        # depend on which role evaluates either, because that is chosen later.
        alone = replace(workload_of(composed), rollouts_evaluate=False)
        costing = Costing(alone, replace(parse_hardware(settings.hardware), seconds={}))
        costs, pools, stay = (
            costing.costs,
            costing.hardware.pools,
            not settings.model.get("offload_encoders", True),
        )
        room = USABLE * min(pool.memory_gib for pool in pools)
        fitting = [
            size for size in sizes if rollout_memory(costing.work, size, stay).gib <= room
        ] or [1]
        seconds = {
            size: [costs.step_seconds(pool, size) / size for pool in pools] for size in fitting
        }
        best = [min(taken) for taken in zip(*seconds.values(), strict=True)]
        good = (
            size
            for size in fitting
            if all(
                taken <= NEARLY * least for taken, least in zip(seconds[size], best, strict=True)
            )
        )
        return next(good, fitting[-1])

    def choose_schedule(self, composed: Composed, processes: int | None) -> Composed:
        """Return `composed` with the best run of a plan where the schedule is auto, and else with
        the best split."""
        if composed.settings.schedule.auto:
            plan = planned_schedule(composed, processes)
            composed = (
                PlainAdvisor().choose_schedule(composed, processes)
                if plan is None
                else _with_best_run(composed, plan)
            )
        split = planned_split(composed, processes)
        return composed if split is None else _with_best_split(composed, split)

    def place_model(
        self, composed: Composed, trainers: int, rollouts: int, usual: ModelPlacement
    ) -> ModelPlacement:
        """Return the first way to shard that fits: replicas, a copy of the weights per node, one
        over all trainers.

        Steps per forward are those that fit into the smallest trainer of the profile and that the
        trainers finish first. Blocks are computed again only as far as each trainer's memory is
        short.
        """
        if not has_counted_sizes(composed):
            return usual
        settings = composed.settings
        costing = costing_of(composed)
        candidate = candidate_of(settings, trainers, rollouts, costing.work.trained_steps)
        fitting = _fitting_shardings(settings, costing, candidate)
        if not fitting:
            if settings.schedule.tsp.batch == AUTO:
                candidate = candidate.with_changes(tsp_batch=1)
            why = [*costing.find_misfits(candidate), gradient_refusal(costing, candidate)]
            raise ValueError(f"{'; '.join(filter(None, why))}: {find_remedy(costing, candidate)}")
        candidate = fitting[0]
        pools = costing.place_ranks(candidate).trainers_by_pool
        kept = [
            costing.choose_recompute(candidate, pool).config for pool, n in pools for _ in range(n)
        ]
        drawn = drawn_of(settings)
        slower = None if drawn is None else trainers_evaluate(costing, drawn, candidate)
        return ModelPlacement(
            candidate.sharding,
            candidate.spec.tsp_batch,
            kept if kept != kept[:1] * trainers else kept[0],
            costing.work.rollouts_evaluate and slower is None,
            slower or NO_ROOM,
        )

    def advise_ranks(self, composed: Composed, trainers: int, rollouts: int) -> Advice:
        """Return the seconds that the profile's costs give, what emulated ranks build, and what the
        report compares."""
        settings = composed.settings
        if not settings.hardware.emulate and not has_counted_sizes(composed):
            return Advice()
        costing = costing_of(composed)
        candidate = candidate_of(settings, trainers, rollouts, costing.work.trained_steps)
        return Advice(
            expected_seconds(settings, costing, candidate),
            stand_ins(composed, trainers, rollouts),
            planned_units(settings, costing, candidate),
        )

    def memory_lines(self, composed: Composed, trainers: int, rollouts: int) -> list[str]:
        """Return what each role's rank will hold, in GiB, by what holds it."""
        return memory_lines(composed, trainers, rollouts) if has_counted_sizes(composed) else []


def planned_schedule(composed: Composed, processes: int | None = None) -> Plan | None:
    """Return the plan that `schedule.auto` follows, with all values that are given and not `auto`.

    The plan is on-policy unless `schedule.async_steps` is given. The result is None if the model's
    sizes are not known, or if nothing fits (`settled` says why). It is also None if the pools are
    processors or differ from the GPUs that are there.
    """
    settings = composed.settings
    pools = list(settings.hardware.pools.values())
    if not has_counted_sizes(composed) or any(pool.gpu == "cpu" for pool in pools):
        return None
    costing = costing_of(composed)
    if processes is not None and processes != costing.hardware.gpus:
        if len(pools) > 1:
            return None
        (pool,) = costing.hardware.pools
        costing = replace(
            costing, hardware=replace(costing.hardware, pools=(replace(pool, count=processes),))
        )
    try:
        return make_plan(
            costing, None, fixed_choices(composed, costing), bool(settings.schedule.async_steps)
        )
    except PlanError:
        return None


def _with_best_run(composed: Composed, plan: Plan) -> Composed:
    """Return `composed` with what the plan's best run needs."""
    best = plan.outcomes[0]
    words = [
        word for word in train_words(best) if word.partition("=")[0] not in named_keys(composed)
    ]
    planned, after = _prediction_of(best), with_words(composed, words)
    keys = {word: word.partition("=")[0] for word in words}
    new = [
        w
        for w, key in keys.items()
        if OmegaConf.select(composed.settings.tree, key)
        != OmegaConf.select(after.settings.tree, key)
    ]
    gained = (
        f", {sync_s / best.step_s:.2f} x schedule=sync"
        if (sync_s := planned["sync_step_s"])
        else ""
    )
    figures, why = explain_winner(plan, asynchronous=True)
    said = (
        f"schedule=auto: {best.candidate.name}, "
        f"{best.candidate.trainers}+{best.candidate.rollouts}, is the best of {plan.simulated} "
        f"simulated runs{gained} (predicted). {figures} {why} It sets {' '.join(new)}."
    )
    return replace(after, notes=(*composed.notes, said), planned=planned)


def planned_split(composed: Composed, processes: int | None = None) -> CandidateOutcome | None:
    """Return the fastest simulated split of the ranks into trainers and rollouts, for the
    configured schedule.

    If no split fits, colocated ranks are tried, which shard the weights that they generate with.
    The result is None if there is nothing to choose (a number or a role settles it), if the model's
    sizes are not known, or if nothing fits.
    """
    settings = composed.settings
    asked = (settings.allocation.trainers, settings.allocation.rollouts)
    if asked != ("auto", "auto") or not has_counted_sizes(composed):
        return None
    costing = costing_of(composed)
    ranks, steps = processes or costing.hardware.gpus, costing.work.trained_steps
    if (
        not any(pool.role == "auto" for pool in costing.hardware.pools)
        or not 1 < ranks <= costing.hardware.gpus
    ):
        return None
    splits: list[Candidate] = []
    for trainers in range(1, ranks + 1):
        if trainers == ranks and splits:
            break
        split = candidate_of(settings, trainers, ranks - trainers, steps)
        if is_allowed(costing, split):
            splits += _fitting_shardings(settings, costing, split)[:1]
    return find_fastest(costing, splits, step_bound(costing))


def _with_best_split(composed: Composed, split: CandidateOutcome) -> Composed:
    """Return `composed` with the split of the ranks that `split` simulated."""
    trainers, rollouts = split.candidate.trainers, split.candidate.rollouts
    said = (
        f"allocation: {trainers}+{rollouts} is the fastest split for this schedule in simulation "
        f"({split.step_s:.4g} s per step); schedule=auto and `make plan` compare schedules and "
        "colocated runs too."
    )
    after = with_words(
        composed, [f"allocation.trainers={trainers}", f"allocation.rollouts={rollouts}"]
    )
    return replace(after, notes=(*composed.notes, said), planned=_prediction_of(split))


def _prediction_of(outcome: CandidateOutcome) -> Planned:
    """Return the predicted schedule and seconds per step, and those of schedule=sync at its best
    split (`sync_step_s`)."""
    candidate = outcome.candidate
    sync = sync_run(outcome.costing, candidate.trainers + candidate.rollouts)
    return {
        "schedule": candidate.name,
        "step_s": outcome.step_s,
        "sync_step_s": None if sync is None else sync.step_s,
    }


def _fitting_shardings(
    settings: Settings, costing: Costing, candidate: Candidate
) -> list[Candidate]:
    """Return `candidate` with each allowed `parallel.sharding` that fits, from the fewest
    collectives to the least memory.

    `auto` steps per forward become a number.
    """
    if candidate.trainers % candidate.spec.context or gradient_refusal(costing, candidate):
        return []
    shardings = [candidate.sharding]
    if settings.parallel.sharding == AUTO and not only_replicas(costing, candidate):
        group = shard_group(settings, candidate.trainers)
        shardings = ["ddp", *(["hsdp"] if 1 < group < candidate.trainers else []), "fsdp"]
    ways = []
    for sharding in shardings:
        trial: Candidate | None = candidate.with_changes(sharding=sharding)
        if settings.schedule.tsp.batch == AUTO:
            trial = _steps_that_fit(costing, candidate.with_changes(sharding=sharding))
        if trial is not None and not costing.find_misfits(trial):
            ways.append(trial)
    return ways


def _steps_that_fit(costing: Costing, candidate: Candidate) -> Candidate | None:
    """Return `candidate` with the steps per forward that fit and with which trainers finish first;
    None if none fit."""
    most = costing.work.most_tsp_batch or costing.work.trained_steps
    trials = [candidate.with_changes(tsp_batch=batch) for batch in range(1, most + 1)]
    fitting = [
        trial
        for trial in trials
        if not any(reason.startswith("trainer") for reason in costing.find_misfits(trial))
    ]

    def training_seconds(trial: Candidate) -> float:
        fragment, updates = training_floor(
            costing.schedule_spec(trial), costing.build_cluster(trial)
        )
        return fragment + max(updates)

    return min(
        fitting,
        key=lambda trial: (round(training_seconds(trial), 4), -trial.spec.tsp_batch),
        default=None,
    )


def expected_seconds(
    settings: Settings, costing: Costing, candidate: Candidate
) -> dict[tuple[str, int], float]:
    """Return (stage, rank) -> seconds by the hardware profile, as `Scheduler.expected` takes
    them."""
    scale, cluster = _time_scale(settings), costing.build_cluster(candidate)
    expected: dict[tuple[str, int], float] = {}
    for number, rank in enumerate(cluster.ranks):
        seconds = {"generate": rank.task_seconds(settings.sampling.steps)}
        if rank.role == "trainer":
            seconds |= {"train": rank.cell_seconds, "switch": cluster.switch_seconds}
            if candidate.rollouts:  # a loan encodes its prompt again
                seconds["generate"] += rank.encode_seconds
        expected |= {(stage, number): scale * value for stage, value in seconds.items()}
    return expected


def planned_units(
    settings: Settings, costing: Costing, candidate: Candidate
) -> dict[str, dict[str, float]]:
    """Return `Advice.planned`: the mean over ranks that generate, and the slowest trainer."""
    cluster, size = costing.build_cluster(candidate), candidate.spec.task_size
    seconds = {
        stage: fmean(getattr(r, f"{stage}_seconds") for r in cluster.rollouts or cluster.trainers)
        for stage in ("encode", "step", "decode", "score")
    }
    seconds["generate"] = seconds.pop("step") * settings.sampling.steps
    seconds["train"] = costing.cell_seconds(candidate)
    seconds["encode"] *= size  # per prompt
    gib = sorted((use.gib, role) for (_, role), use in costing.rank_memory(candidate).items())
    return {
        "gib": {role: held for held, role in gib},
        "seconds": {
            stage: _time_scale(settings) / size * value for stage, value in seconds.items()
        },
    }


def _time_scale(settings: Settings) -> float:
    return float(settings.hardware.time_scale) if settings.hardware.emulate else 1.0


def memory_lines(composed: Composed, trainers: int, rollouts: int) -> list[str]:
    """Return what each role's rank will hold, in GiB, by what holds it."""
    costing = costing_of(composed)
    candidate = candidate_of(composed.settings, trainers, rollouts, costing.work.trained_steps)
    several = len({name for name, _ in costing.place_ranks(candidate).ranks}) > 1
    lines = []
    for (pool, role), use in costing.rank_memory(candidate).items():
        where = f"{role} on {pool}" if several else role
        lines.append(f"memory    {where}: {use.gib:.1f} GiB ({_memory_parts(use)})")
        if role == "trainer":
            lines[-1] += (
                ", gradient checkpointing "
                f"{costing.choose_recompute(candidate, costing.hardware.find_pool(pool)).config}"
            )
    for pool, gib in costing.host_gib(candidate).items():
        where = f"host of a node of {pool}" if several else "host"
        lines.append(
            f"memory    {where}: {gib:.1f} GiB (off-loaded activations, weights, evaluations)"
        )
    return lines


def _memory_parts(use: Memory) -> str:
    held = {name: size / GIB for name, size in vars(use).items()}
    return ", ".join(f"{name} {gib:.1f}" for name, gib in held.items() if gib >= 0.05)
