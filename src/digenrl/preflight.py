"""What is settled and said before anything is allocated: `auto` values as numbers, and the memory of each rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from digenrl import hardware
from digenrl.config import Composed, config_directory, instantiate
from digenrl.config.compose import merge_words
from digenrl.config.relations import most_rollouts, relation_problems
from digenrl.extensions.planner.candidate import Candidate, Costing
from digenrl.extensions.planner.costs import as_sent
from digenrl.extensions.planner.floor import training_floor
from digenrl.extensions.planner.measured import with_measured
from digenrl.extensions.planner.memory import GIB, USABLE, Memory, rollout_memory
from digenrl.extensions.planner.outcome import Outcome
from digenrl.extensions.planner.plan_text import explanation, overrides
from digenrl.extensions.planner.planner import Plan, PlanError, fastest, make_plan, sync_run
from digenrl.extensions.planner.workload import Workload
from digenrl.facts import counted
from digenrl.hardware import assign, parse_hardware
from digenrl.recompute import AUTO, parse_recompute
from digenrl.schedule import ScheduleSpec, groups_of_step, slices_of_group, steps_per_forward

NEARLY = 1.05
"""Seconds of a sample that `sampling.task_size=auto` takes for as good as the best."""
SMALL_TASK = 8
"""Most samples of a task of a model that nobody has counted; the planner tries no more either."""
ROLLOUTS = "rollouts, while trainers go on"
"""Who evaluates."""
_STORAGE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def allocation(config: Any, processes: int | None = None) -> tuple[int, int]:
    """(trainers, rollouts) with every `auto` resolved: from the number of `processes` when somebody else started them,
    else from the hardware profile's pools. A pool's role says what its devices do; devices without a role are shared
    evenly (`planned_split` knows better where the model's sizes are known), and on processors one of each is the
    default. Of {min, max} it is max.

    Raises:
        ValueError: {min, max} where somebody else starts a fixed number of processes.
    """
    trainers, rollouts = config.allocation.trainers, most_rollouts(config.allocation.rollouts)
    if processes is not None:
        if rollouts != config.allocation.rollouts:
            raise ValueError(
                f"allocation.rollouts = {config.allocation.rollouts}: torchrun and SLURM start a fixed number of "
                "ranks; give a number or auto and let others join (digenrl join), or start the run with launch=ray."
            )
        if trainers == "auto":
            trainers = processes - rollouts if isinstance(rollouts, int) else max(1, processes // 2)
        return int(trainers), int(processes - trainers if rollouts == "auto" else rollouts)
    counts = {"trainer": 0, "rollout": 0, "auto": 0}
    for pool in config.hardware.pools.values():
        counts[pool.get("role", "auto")] += pool.count if pool.gpu != "cpu" else 2
    if trainers == "auto":
        room = counts["trainer"] + counts["auto"]
        trainers = max(1, room - (rollouts if isinstance(rollouts, int) else (counts["auto"] + 1) // 2))
    if rollouts == "auto":
        rollouts = max(1, counts["rollout"] + counts["auto"] - max(0, trainers - counts["trainer"]))
    return int(trainers), int(rollouts)


def begins_with(config: Any) -> tuple[int, int]:
    """Return (trainers, rollouts) that a settled run starts; a launcher with places of its own lets the rest of
    {min, max} join when it has them."""
    rollouts = config.allocation.rollouts
    elastic = config.launch != "local" and rollouts != most_rollouts(rollouts)
    return config.allocation.trainers, rollouts["min"] if elastic else most_rollouts(rollouts)


def planned_split(composed: Composed, processes: int | None = None) -> Outcome | None:
    """The simulated best of all splits of the ranks into trainers and rollouts, for the configured schedule; colocated
    ranks where no split fits, because they shard what they generate with. None where there is nothing to choose (a
    number or a role settles it), the model's sizes are not known, or nothing fits.
    """
    config: Any = composed.config
    asked = (config.allocation.trainers, config.allocation.rollouts)
    if asked != ("auto", "auto") or not sized(composed):
        return None
    costing = costing_of(composed)
    ranks, steps = processes or costing.hardware.gpus, costing.work.trained_steps
    if not any(pool.role == "auto" for pool in costing.hardware.pools) or not 1 < ranks <= costing.hardware.gpus:
        return None
    splits: list[Candidate] = []
    for trainers in range(1, ranks + 1):
        if trainers == ranks and splits:
            break
        try:
            splits += _held(config, costing, candidate_of(config, trainers, ranks - trainers, steps))[:1]
        except ValueError:  # the roles of the pools do not allow it
            continue
    return fastest(costing, splits, costing.bound())


def with_task_size(composed: Composed) -> Composed:
    """The configuration with a number for `sampling.task_size`.

    `auto` is a matter of model, sizes and hardware profile alone, so that samples are the same in every schedule: of
    the sizes that fit, the smallest at which a denoising step of a sample takes little longer than at the best one, on
    every pool. Small pictures are bound by launches, so that more of them cost nothing; large ones by arithmetic. No
    task has samples of two updates.
    """
    config: Any = composed.config
    if config.sampling.task_size != AUTO:
        return composed
    portion = config.data.group_size // slices_of_group(config.data.updates_split, config.algorithm.updates_per_batch)
    sizes = [size for size in range(1, portion + 1) if portion % size == 0]
    tree: Any = OmegaConf.to_container(config)
    if sized(composed):
        # Seconds that were measured are those of one size, and do not say what another takes.
        alone = replace(workload(composed), rollouts_evaluate=False)  # nor does it follow who evaluates
        costing = Costing(alone, replace(parse_hardware(config.hardware), seconds={}))
        costs, pools, stay = costing.costs, costing.hardware.pools, not config.model.get("offload_encoders", True)
        room = USABLE * min(pool.memory_gib for pool in pools)
        fitting = [size for size in sizes if rollout_memory(costing.work, size, stay).gib <= room] or [1]
        seconds = {size: [costs.step_seconds(pool, size) / size for pool in pools] for size in fitting}
        best = [min(taken) for taken in zip(*seconds.values(), strict=True)]
        good = (
            size
            for size in fitting
            if all(taken <= NEARLY * least for taken, least in zip(seconds[size], best, strict=True))
        )
        tree["sampling"]["task_size"] = next(good, fitting[-1])
    else:
        tree["sampling"]["task_size"] = max(size for size in sizes if size <= SMALL_TASK)
    numbers = OmegaConf.create(tree)
    OmegaConf.set_readonly(numbers, True)
    return replace(composed, config=numbers)


def allocated(composed: Composed, processes: int | None = None) -> Composed:
    """`settled`, with the schedule and the allocation that are asked for, or else planned (a note says so), or else the
    profile's.

    Raises:
        ValueError: as `allocation` and `settled`.
    """
    composed = with_task_size(composed)
    if composed.config.schedule.auto:
        plan = planned_schedule(composed, processes)
        composed = _unplanned(composed) if plan is None else _chosen(composed, plan)
    planned = planned_split(composed, processes)
    if planned is None:
        return settled(composed, *allocation(composed.config, processes))
    trainers, rollouts = planned.candidate.trainers, planned.candidate.rollouts
    said = (
        f"allocation: {trainers}+{rollouts} is the fastest split for this schedule in simulation "
        f"({planned.step_s:.4g} s per step); schedule=auto and `make plan` compare schedules and colocated runs too."
    )
    noted = replace(composed, notes=(*composed.notes, said), planned=_predicted(planned))
    return settled(noted, trainers, rollouts)


def planned_schedule(composed: Composed, processes: int | None = None) -> Plan | None:
    """The plan that `schedule.auto` follows: on policy unless `schedule.async_steps` is given, with all that is given
    and not `auto`. None where the model's sizes are not known, the pools are processors or not those that are there, or
    nothing fits (`settled` says why).
    """
    config: Any = composed.config
    pools = list(config.hardware.pools.values())
    if not sized(composed) or any(pool.gpu == "cpu" for pool in pools):
        return None
    costing = costing_of(composed)
    if processes is not None and processes != costing.hardware.gpus:
        if len(pools) > 1:
            return None
        (pool,) = costing.hardware.pools
        costing = replace(costing, hardware=replace(costing.hardware, pools=(replace(pool, count=processes),)))
    try:
        return make_plan(costing, None, given(composed, costing), bool(config.schedule.async_steps))
    except PlanError:
        return None


CHOICES = {
    "parallel.sharding": "sharding",
    "parallel.context": "context",
    "sampling.task_size": "task_size",
    "model.gradient_checkpointing": "recompute",
    "model.offload_encoders": "encoders",
    "schedule.gap": "gap",
    "schedule.claims": "static_claims",
    "schedule.tsp.batch": "tsp_batch",
    "schedule.tsp.shard": "tsp_shard",
    "schedule.tag": "tag",
    "schedule.shares": "shares",
    "schedule.stale_fraction": "stale_fraction",
}
"""Key -> field of `Candidate` or `ScheduleSpec`."""


def given(composed: Composed, costing: Costing) -> dict[str, Any]:
    """What is not left to the planner, as `make_plan` takes it: keys of the command line, and values that are neither
    `auto` nor off."""
    config: Any = composed.config
    trainers, rollouts = config.allocation.trainers, most_rollouts(config.allocation.rollouts)
    gpus = costing.hardware.gpus
    fixed: dict[str, Any] = {"skip_zero": config.schedule.skip_zero}
    if isinstance(trainers, int) or isinstance(rollouts, int):
        fixed["trainers"] = trainers if isinstance(trainers, int) else gpus - rollouts
        fixed["rollouts"] = rollouts if isinstance(rollouts, int) else max(0, gpus - trainers)
    candidate = candidate_of(config, 1, 0, costing.work.trained_steps)
    values = {**vars(candidate.spec), **vars(candidate)}
    usual = {each.name: each.default for kind in (ScheduleSpec, Candidate) for each in fields(kind)}
    for key, name in CHOICES.items():
        differs = usual[name] is not MISSING and values[name] != usual[name]
        if OmegaConf.select(config, key) != AUTO and (key in named(composed) or differs):
            fixed[name] = values[name]
    return fixed


def named(composed: Composed) -> set[str]:
    """Keys of the command line that the planner leaves alone."""
    return {word.lstrip("+").partition("=")[0] for word in composed.overrides} - {"schedule.auto"}


def _chosen(composed: Composed, plan: Plan) -> Composed:
    """`composed` with what the plan's best run needs."""
    best = plan.outcomes[0]
    words = [word for word in overrides(best) if word.partition("=")[0] not in named(composed)]
    changed, planned = _with(composed, words), _predicted(best)
    keys = {word: word.partition("=")[0] for word in words}
    new = [w for w, key in keys.items() if OmegaConf.select(composed.config, key) != OmegaConf.select(changed, key)]
    gained = f", {planned['sync_step_s'] / best.step_s:.2f} x schedule=sync" if planned["sync_step_s"] else ""
    figures, why, _ = explanation(plan, asynchronous=True)
    said = (
        f"schedule=auto: {best.candidate.name}, {best.candidate.trainers}+{best.candidate.rollouts}, is the best of "
        f"{plan.simulated} simulated runs{gained} (predicted). {figures} {why} It sets {' '.join(new)}."
    )
    return replace(composed, config=changed, notes=(*composed.notes, said), planned=planned)


def _predicted(outcome: Outcome) -> dict[str, Any]:
    """What the simulation promises, for the run's records; `sync_step_s` is that of schedule=sync at its best split."""
    candidate = outcome.candidate
    sync = sync_run(outcome.costing, candidate.trainers + candidate.rollouts)
    return {"schedule": candidate.name, "step_s": outcome.step_s, "sync_step_s": sync and sync.step_s}


def _unplanned(composed: Composed) -> Composed:
    """`schedule.auto` where nothing can be planned: groups are trained as they complete, where advantages allow it."""
    words = ["schedule.auto=false"]
    if "schedule.gap" not in named(composed) and not _whole_batch(composed.config):
        words.append("schedule.gap=1")
    said = f"schedule=auto: nothing is known to plan with here (docs/planner.md): {' '.join(words)}."
    return replace(composed, config=_with(composed, words), notes=(*composed.notes, said))


def _with(composed: Composed, words: list[str]) -> DictConfig:
    """The configuration, changed by the words of a command line."""
    tree: Any = OmegaConf.to_container(composed.config)
    config = OmegaConf.create(tree)
    if wrong := merge_words(config, words, "train"):
        raise ValueError("\n".join(wrong))
    OmegaConf.set_readonly(config, True)
    return config


def settled(composed: Composed, trainers: int, rollouts: int) -> Composed:
    """Return the configuration with values for allocation, `parallel.sharding`, `schedule.tsp.batch` and
    `model.gradient_checkpointing`.

    `auto` sharding is the first that fits: replicas, a copy of the weights per node, one over all trainers. `auto`
    steps per forward are those that fit into the smallest trainer of the profile and that the trainers finish first;
    all of them where the model's sizes are not known. `auto` checkpointing becomes what each trainer's GPU needs to
    repeat least (one value, or a list in the order of the trainers); with both, the fastest combination. A tiny build
    repeats nothing, a real one of unknown sizes every block.

    Raises:
        ValueError: the numbers contradict another key; or a rank would not fit into its GPU's memory (gives the
            estimate, the pool, and a change that fits if there is one).
    """
    config: Any = composed.config
    tree: Any = OmegaConf.to_container(config)
    tree["allocation"]["trainers"] = trainers
    if most_rollouts(tree["allocation"]["rollouts"]) != rollouts:  # auto; {min, max} stays
        tree["allocation"]["rollouts"] = rollouts
    evaluators(config, rollouts)
    notes = composed.notes
    if wrong := relation_problems(tree):
        raise ValueError("\n".join(wrong))
    steps = trained_steps(config)
    asked = config.schedule.tsp.batch
    batch = steps_per_forward(asked, steps)
    tree["parallel"]["sharding"] = sharding(config)
    if sized(composed):
        costing = costing_of(composed)
        if not costing.work.rollouts_evaluate and evaluators(config, rollouts) == ROLLOUTS:
            tree["allocation"]["evaluation"] = "trainers"
            notes = (*notes, "allocation.evaluation=trainers: rollouts have no memory for the evaluation's samples.")
        candidate = candidate_of(config, trainers, rollouts, steps)
        fitting = _held(config, costing, candidate)
        if not fitting and not config.hardware.emulate:
            if asked == AUTO:
                candidate = candidate.but(tsp_batch=1)
            raise ValueError(f"{'; '.join(costing.misfits(candidate))}: {_way_out(costing, candidate)}")
        candidate = next(iter(fitting), candidate)
        tree["parallel"]["sharding"] = candidate.sharding
        batch = candidate.spec.tsp_batch
        if config.model.get("gradient_checkpointing") == AUTO:
            names = [name for name, role in costing.placed(candidate) if role == "trainer"]
            values = [costing.recompute(candidate, costing.hardware.pool(name)).config for name in names]
            tree["model"]["gradient_checkpointing"] = values if values != values[:1] * trainers else values[0]
    elif config.model.get("gradient_checkpointing") == AUTO:  # tiny builds fit; of others nobody knows
        tree["model"]["gradient_checkpointing"] = config.hardware.build == "real"
    tree["schedule"]["tsp"]["batch"] = batch
    numbers = OmegaConf.create(tree)
    OmegaConf.set_readonly(numbers, True)
    return replace(composed, config=numbers, notes=(*notes, *without_effect(numbers)))


def without_effect(config: Any) -> Iterator[str]:
    """A line for each schedule setting that has no effect with the settled allocation and the other settings."""
    schedule, trainers, rollouts = config.schedule, config.allocation.trainers, config.allocation.rollouts
    updates = config.algorithm.updates_per_batch
    groups = groups_of_step(config.data) * slices_of_group(config.data.updates_split, updates) // updates
    idle = "schedule.{}: has no effect here, because {}.".format
    if schedule.tag and rollouts == 0:
        yield idle("tag = true", "colocated ranks take turns at generating and training")
    if schedule.tsp.shard and trainers == 1:
        yield idle("tsp.shard = true", "only one rank trains")
    if schedule.gap > groups:
        yield idle(f"gap = {schedule.gap}", f"an update has {groups} groups: it is the same as {groups}")
    if schedule.shares != "equal" and trainers == 1:
        yield idle(f"shares = {schedule.shares}", "only one rank trains")
    elif schedule.shares == "measured" and config.parallel.sharding != "ddp":
        yield (
            "schedule.shares = measured: has no effect beyond the profile's speeds, because under "
            f"{config.parallel.sharding} trainers compute each forward together and cannot be timed apart."
        )
    elif schedule.shares != "equal" and config.parallel.sharding == "fsdp":
        yield (
            f"schedule.shares = {schedule.shares}: has no effect on predicted times, because under fsdp they take each "
            "forward as one of all trainers."
        )
    if schedule.async_steps and schedule.stale_fraction == 0:
        yield idle("async_steps = 1", "schedule.stale_fraction=0 lets no group use older weights")


def trainers_must_evaluate(config: Any, rollouts: int) -> str | None:
    """Why trainers evaluate by themselves, as settled or for the configuration as it is; None: rollouts do. Rollouts
    hold weights in the dtype that every forward casts them to, so that samples are the same."""
    if config.allocation.evaluation == "trainers":
        return "allocation.evaluation=trainers says so"
    if config.replay is not None or rollouts == 0:
        return "no rank only generates"
    if len(_evaluations(config)) > 1:
        return f"there are {len(_evaluations(config))} evaluations among the callbacks, and rollouts make one"
    copied = config.model.get("keep_reference") and config.model.get("lora") is None
    if copied and any(node.get("kl_samples", 1) for node in _evaluations(config)):
        return "trainers alone keep the base model, and callbacks.evaluation.kl_samples asks for the distance to it"
    return None


def _evaluations(config: Any) -> list[Any]:
    """The evaluations among the callbacks."""
    return [node for node in (config.callbacks or {}).values() if str(node["_target_"]).endswith("Evaluation")]


def evaluators(config: Any, rollouts: int) -> str | None:
    """Who evaluates, and why trainers where they do; None where nobody does.

    Raises:
        ValueError: rollouts are asked to, and cannot.
    """
    if not _evaluations(config):
        return None
    cause = trainers_must_evaluate(config, rollouts)
    if cause is not None and config.allocation.evaluation == "rollouts":
        raise ValueError(
            f"allocation.evaluation = rollouts: cannot be, because {cause}; set allocation.evaluation=auto, with which "
            "trainers evaluate there."
        )
    return ROLLOUTS if cause is None else f"trainers ({cause})"


def sharding(config: Any) -> str:
    """`parallel.sharding`; replicas where nobody has settled `auto`."""
    return "ddp" if config.parallel.sharding == AUTO else str(config.parallel.sharding)


def shard_group(config: Any, trainers: int) -> int:
    """`parallel.shard_group` as a number: `auto` follows the smallest node of the pools that may train."""
    if isinstance(config.parallel.shard_group, int):
        return int(config.parallel.shard_group)
    pools = [pool for pool in config.hardware.pools.values() if pool.get("role", "auto") != "rollout"]
    nodes = [int(pool.get("per_node", min(pool.count, 8))) for pool in pools]
    return hardware.shard_group(trainers, min(nodes, default=trainers))


def trainer_speeds(config: Any, trainers: int, rollouts: int) -> tuple[float, ...]:
    """Speed of each trainer rank on its pool: by the profile's measured seconds per cell where it has them, else by the
    peak."""
    profile = parse_hardware(config.hardware)
    pools = [profile.pool(name) for name, _ in assign(profile, trainers, rollouts)[:trainers]]
    measured = profile.seconds.get("train", {})
    if all(pool.name in measured for pool in pools):
        return tuple(1.0 / measured[pool.name] for pool in pools)
    return tuple(pool.tflops for pool in pools)


def _held(config: Any, costing: Costing, candidate: Candidate) -> list[Candidate]:
    """`candidate` with each allowed `parallel.sharding`, from the fewest collectives to the least memory, and with
    `auto` steps per forward as a number; those that fit."""
    if candidate.trainers % candidate.spec.context:
        return []
    shardings = [candidate.sharding]
    if config.parallel.sharding == AUTO and candidate.trainers > 1:
        group = shard_group(config, candidate.trainers)
        shardings = ["ddp", *(["hsdp"] if 1 < group < candidate.trainers else []), "fsdp"]
    ways = []
    for sharding in shardings:
        trial: Candidate | None = candidate.but(sharding=sharding)
        if config.schedule.tsp.batch == AUTO:
            trial = _steps_that_fit(costing, candidate.but(sharding=sharding))
        if trial is not None and not costing.misfits(trial):
            ways.append(trial)
    return ways


def _steps_that_fit(costing: Costing, candidate: Candidate) -> Candidate | None:
    """`candidate` with that many steps per forward, of those that fit, whose blocks the trainers finish first."""
    trials = [candidate.but(tsp_batch=batch) for batch in range(1, costing.work.trained_steps + 1)]
    fitting = [trial for trial in trials if not costing.trainer_misfits(trial)]

    def seconds(trial: Candidate) -> float:
        fragment, updates = training_floor(costing.spec(trial), costing.cluster(trial))
        return fragment + max(updates)

    return min(fitting, key=lambda trial: (round(seconds(trial), 4), -trial.spec.tsp_batch), default=None)


CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("schedule.tsp.batch=1", {"tsp_batch": 1}),
    ("model.gradient_checkpointing=auto", {"recompute": None}),
    ("parallel.sharding=fsdp", {"sharding": "fsdp"}),
    ("model.offload_encoders=true", {"encoders": False}),
    ("sampling.task_size=1", {"task_size": 1}),
)
"""Settings that take less memory, the cheapest first, as words and as a candidate's choices."""


def _way_out(costing: Costing, candidate: Candidate) -> str:
    """The fewest settings that make `candidate` fit, for this split or for another; or that there are none."""
    one_by_one = Costing(replace(costing.work, evaluated=min(1, costing.work.evaluated)), costing.hardware)
    apart = Costing(replace(costing.work, rollouts_evaluate=False), costing.hardware)
    ways = ("", costing), ("sampling.eval.batch=1 ", one_by_one), ("allocation.evaluation=trainers ", apart)
    for said, way in ways:
        if (words := _changes(way, candidate)) is not None:
            return f"set {said}{' '.join(words)}".rstrip() + "."
    return (
        "no split of this profile's GPUs fits, however its ranks hold the model: train LoRA (model.lora), take a "
        "smaller resolution or fewer frames, use more or larger GPUs, or correct memory_gib or host_gib of the "
        "profile's pools."
    )


def _changes(costing: Costing, candidate: Candidate) -> list[str] | None:
    """The words of `_way_out`; None where nothing helps."""
    tokens = [(f"parallel.context={n}", {"context": n}) for n in costing.contexts(candidate)[-1:]]
    known = [(word, change) for word, change in (*CHANGES, *tokens) if candidate.but(**change) != candidate]
    for count in range(len(known) + 1):
        for chosen in itertools.combinations(known, count):
            trial = candidate.but(**{key: value for _, change in chosen for key, value in change.items()})
            if not costing.misfits(trial):
                return [word for word, _ in chosen]
    smallest = candidate.but(**{key: value for _, change in CHANGES for key, value in change.items()})
    gpus = costing.hardware.gpus
    for trainers in range(gpus, 0, -1):
        sharding = "fsdp" if trainers > 1 else "ddp"
        split = smallest.but(trainers=trainers, rollouts=gpus - trainers, sharding=sharding)
        for context in (1, *costing.contexts(split)[-1:]):
            try:
                if costing.misfits(split.but(context=context)):
                    continue
            except ValueError:  # the roles of the pools do not allow it
                break
            words = [f"allocation.trainers={trainers}", f"allocation.rollouts={gpus - trainers}"]
            words += [w for w, change in known if w not in dict(tokens) and (trainers > 1 or "sharding" not in change)]
            words += [f"parallel.context={context}"] * (context != candidate.spec.context)
            return words
    return None


def sized(composed: Composed) -> bool:
    """Whether the model is a real build whose sizes have been counted, on pools whose memory is known."""
    config: Any = composed.config
    known = composed.choices.get("model") in counted() and config.model.get("build") == "real"
    return known and all(pool.get("memory_gib") for pool in config.hardware.pools.values())


def expected_seconds(composed: Composed, trainers: int, rollouts: int) -> dict[tuple[str, int], float]:
    """(stage, rank) -> seconds by the hardware profile, as `SchedulePolicy.expected` takes them; {} where the model's
    sizes are not known."""
    config: Any = composed.config
    if not config.hardware.emulate and not sized(composed):
        return {}
    costing, scale = costing_of(composed), config.hardware.time_scale if config.hardware.emulate else 1.0
    candidate = candidate_of(config, trainers, rollouts, costing.work.trained_steps)
    cluster = costing.cluster(candidate)
    expected: dict[tuple[str, int], float] = {}
    for number, rank in enumerate(cluster.ranks):
        seconds = {"generate": rank.task_seconds(config.sampling.steps)}
        if rank.role == "trainer":
            seconds |= {"train": rank.cell_seconds, "switch": cluster.switch_seconds}
            seconds["generate"] += rank.encode_seconds if rollouts else 0.0  # a loan encodes its prompt again
        expected |= {(stage, number): scale * value for stage, value in seconds.items()}
    return expected


def memory_lines(composed: Composed, trainers: int, rollouts: int) -> list[str]:
    """What each role's rank will hold, in GiB, by what holds it; nothing for models without counted sizes."""
    if not sized(composed):
        return []
    costing = costing_of(composed)
    candidate = candidate_of(composed.config, trainers, rollouts, costing.work.trained_steps)
    several = len({name for name, _ in costing.placed(candidate)}) > 1
    lines = []
    for (pool, role), use in costing.memory(candidate).items():
        where = f"{role} on {pool}" if several else role
        lines.append(f"memory    {where}: {use.gib:.1f} GiB ({_parts(use)})")
        if role == "trainer":
            lines[-1] += f", gradient checkpointing {costing.recompute(candidate, costing.hardware.pool(pool)).config}"
    for pool, gib in costing.host_gib(candidate).items():
        where = f"host of a node of {pool}" if several else "host"
        lines.append(f"memory    {where}: {gib:.1f} GiB (off-loaded activations, published weights)")
    return lines


def _parts(use: Memory) -> str:
    held = {name: size / GIB for name, size in vars(use).items()}
    return ", ".join(f"{name} {gib:.1f}" for name, gib in held.items() if gib >= 0.05)


def costing_of(composed: Composed) -> Costing:
    """The experiment on its hardware profile; raises ValueError for a model without counted sizes."""
    work, folder = workload(composed), config_directory() / "hardware" / "measured"
    profile = parse_hardware(composed.config.hardware)
    lines = {pools: as_sent(line, composed.config.network) for pools, line in profile.lines.items()}
    return Costing(work, with_measured(replace(profile, lines=lines), work, folder))


def workload(composed: Composed) -> Workload:
    """The experiment's numbers. Raises ValueError for a model without counted sizes."""
    config: Any = composed.config
    model_name = composed.choices["model"]
    if model_name not in counted():
        raise ValueError(
            f"model={model_name} has no counted sizes to plan with (known: {', '.join(sorted(counted()))}). A "
            "small one is measured faster than planned: `python -m digenrl.cli.train "
            f"experiment={composed.choices['experiment']} hardware={composed.choices['hardware']} max_rl_steps=3` ends "
            "with step_s in summary.json. A large one is counted by benchmarks/count_facts.py, once."
        )
    sampling, algorithm, model = config.sampling, config.algorithm, config.model
    lora = model.get("lora")
    embedded = float(model.get("true_cfg_scale", 1.0)) > 1.0 if "true_cfg_scale" in model else None
    drawn = [int(node.get("samples_per_prompt", 0)) for node in _evaluations(config)]
    guided = float(sampling.guidance_scale or 1.0) > 1.0 if embedded is None else embedded
    work = Workload(
        model=model_name,
        height=sampling.height,
        width=sampling.width,
        frames=sampling.frames,
        steps=sampling.steps,
        trained_steps=trained_steps(config),
        prompts=groups_of_step(config.data),
        oversample=config.data.oversample,
        group_size=config.data.group_size,
        updates=algorithm.updates_per_batch,
        updates_split=config.data.updates_split,
        guidance=guided,
        lora_rank=int(lora.rank) if lora else None,
        trained_samples=_trained_samples(config),
        stored_prompts=config.data.prompt_store is not None,
        whole_batch=_whole_batch(config),
        lora_targets="attn" if lora and lora.get("targets") == "attention" else "attn_ff",
        reference=float(algorithm.get("kl_weight") or 0.0) > 0.0,
        ema=algorithm.get("ema") is not None,
        rewards=tuple(config.reward.get("rewards", {})),
        heldout=tuple(config.reward.get("heldout") or {}),
        evaluated=max((min(n, sampling.eval.batch or n) for n in drawn), default=0),
        engine="compiled" if model.get("compile", False) else "eager",
        fused_attention=bool(model.get("attention_backend")),
        storage_bytes=_STORAGE[sampling.storage_dtype],
    )
    most = most_rollouts(config.allocation.rollouts)
    able = bool(drawn) and trainers_must_evaluate(config, 1 if most == AUTO else most) is None
    asked = config.allocation.evaluation == "rollouts"
    return replace(work, rollouts_evaluate=able and (asked or _has_room(config, work)))


def _has_room(config: Any, work: Workload) -> bool:
    """Whether the samples of an evaluation fit beside the model on every GPU that a rollout may have."""
    pools = [pool for pool in parse_hardware(config.hardware).pools if pool.role != "trainer"]
    stay, size = not config.model.get("offload_encoders", True), config.sampling.task_size
    need = rollout_memory(replace(work, rollouts_evaluate=True), 1 if size == AUTO else size, stay).gib
    return all(need <= USABLE * pool.memory_gib for pool in pools)


def _whole_batch(config: Any) -> bool:
    """Whether advantages need every reward of the batch."""
    advantage = config.algorithm.advantage
    return advantage.std in ("batch", "max_group") or bool(advantage.get("renormalise"))


def _trained_samples(config: Any) -> int | None:
    """2k of a group where only the k best and k worst have an advantage, nothing else holds the others, and cells
    without a gradient are skipped; otherwise None."""
    k = config.algorithm.advantage.get("best_and_worst")
    skips = config.schedule.skip_zero and "surrogate" in config.algorithm and not config.algorithm.kl_weight
    return 2 * k if k and skips and 2 * k < config.data.group_size else None


def trained_steps(config: Any) -> int:
    """S: what `algorithm.train_steps` counts among sampling.steps. Its class is imported, and torch if that needs it.

    Raises:
        ValueError: the selection does not fit into sampling.steps.
    """
    selection = config.algorithm.train_steps
    try:
        return int(instantiate(selection).count(config.sampling.steps))
    except ValueError as error:
        raise ValueError(f"algorithm.train_steps = {OmegaConf.to_container(selection)}: {error}") from error


def candidate_of(config: Any, trainers: int, rollouts: int, trained: int) -> Candidate:
    """The configuration as the planner and the emulation see it; `trained` denoising steps."""
    asked = config.model.get("gradient_checkpointing", False)
    if isinstance(asked, ListConfig):  # settled for each trainer: the planner's own choice gives the same
        asked = AUTO
    return Candidate(
        trainers,
        rollouts,
        replace(ScheduleSpec.from_config(config, trained), shares=(), measured_shares=False),
        sharding=sharding(config),
        shard_group=config.parallel.shard_group if isinstance(config.parallel.shard_group, int) else None,
        recompute=None if asked == AUTO else parse_recompute(asked),
        encoders=not config.model.get("offload_encoders", True),
        shares=config.schedule.shares != "equal",
        static_claims=config.schedule.claims == "split",
    )
