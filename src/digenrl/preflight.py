"""What is settled and said before anything is allocated: `auto` values as numbers, and the memory of each rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from omegaconf import ListConfig, OmegaConf

from digenrl.config import Composed, instantiate
from digenrl.config.relations import relation_problems
from digenrl.recompute import AUTO, parse_recompute
from digenrl.schedule import ScheduleSpec, steps_per_forward
from digenrl.simulate import hardware
from digenrl.simulate.candidate import Candidate, Costing
from digenrl.simulate.floor import training_floor
from digenrl.simulate.hardware import assign, parse_hardware
from digenrl.simulate.memory import GIB, Memory
from digenrl.simulate.outcome import Outcome, evaluate
from digenrl.simulate.planner import fastest
from digenrl.simulate.workload import Workload, facts

_STORAGE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def allocation(config: Any, processes: int | None = None) -> tuple[int, int]:
    """(trainers, rollouts) with every `auto` resolved: from the number of `processes` when somebody else started them,
    else from the hardware profile's pools. A pool's role says what its devices do; devices without a role are shared
    evenly (`planned_split` knows better where the model's sizes are known), and on processors one of each is the
    default.
    """
    trainers, rollouts = config.allocation.trainers, config.allocation.rollouts
    if processes is not None:
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


def planned_split(composed: Composed, processes: int | None = None) -> Outcome | None:
    """The simulated best of all splits of the ranks into trainers and rollouts, for the configured schedule. None where
    there is nothing to choose (a number or a role settles it), the model's sizes are not known, or no split fits.
    """
    config: Any = composed.config
    asked = (config.allocation.trainers, config.allocation.rollouts)
    if asked != ("auto", "auto") or not sized(composed):
        return None
    costing = costing_of(composed)
    ranks, steps = processes or costing.hardware.gpus, costing.work.trained_steps
    if not any(pool.role == "auto" for pool in costing.hardware.pools) or not 1 < ranks <= costing.hardware.gpus:
        return None
    splits = []
    for trainers in range(1, ranks):
        trial = candidate_of(config, trainers, ranks - trainers, steps)
        try:
            if config.schedule.tsp.batch == "auto":
                trial = trial.but(tsp_batch=_steps_that_fit(costing, trial, steps))
            if not costing.misfits(trial):
                splits.append(trial)
        except ValueError:  # the roles of the pools, or memory, do not allow it
            continue
    return fastest(costing, splits, costing.bound())


def allocated(composed: Composed, processes: int | None = None) -> Composed:
    """`settled`, with the allocation that is asked for, or else planned (a note says so), or else the profile's.

    Raises:
        ValueError: as `allocation` and `settled`.
    """
    planned = planned_split(composed, processes)
    if planned is None:
        return settled(composed, *allocation(composed.config, processes))
    trainers, rollouts = planned.candidate.trainers, planned.candidate.rollouts
    sync = planned.candidate.but(gap=0, tsp_batch=1, tsp_shard=False, tag=False, handoff=False, async_steps=0)
    gained = evaluate(planned.costing, sync, planned.bound).step_s / planned.step_s
    said = (
        f"allocation: {trainers}+{rollouts} is the fastest split for this schedule in simulation "
        f"({planned.step_s:.4g} s per step, {gained:.2f} times as fast as schedule=sync should be); "
        "`make plan` compares schedules and colocated runs too."
    )
    return settled(replace(composed, notes=(*composed.notes, said)), trainers, rollouts)


def settled(composed: Composed, trainers: int, rollouts: int) -> Composed:
    """The configuration with allocation, `schedule.tsp.batch` and `model.gradient_checkpointing` as values.

    `auto` steps per forward are those that fit into the smallest trainer of the profile and that the trainers finish
    first; all of them where the model's sizes are not known. `auto` checkpointing becomes what each trainer's GPU needs
    to repeat least (one value, or a list in the order of the trainers); with both, the fastest combination.

    Raises:
        ValueError: the numbers contradict another key; or not even one step per forward fits (gives the estimate, the
            pool and what to change).
    """
    config: Any = composed.config
    tree: Any = OmegaConf.to_container(config)
    tree["allocation"] |= {"trainers": trainers, "rollouts": rollouts}
    if wrong := relation_problems(tree):
        raise ValueError("\n".join(wrong))
    steps = trained_steps(config)
    asked = config.schedule.tsp.batch
    batch = steps_per_forward(asked, steps)
    if sized(composed):
        costing = costing_of(composed)
        candidate = candidate_of(config, trainers, rollouts, steps)
        if asked == "auto":
            batch = _steps_that_fit(costing, candidate, steps)
            candidate = candidate.but(tsp_batch=batch)
        if config.model.get("gradient_checkpointing") == AUTO:
            names = [name for name, role in costing.placed(candidate) if role == "trainer"]
            values = [costing.recompute(candidate, costing.hardware.pool(name)).config for name in names]
            tree["model"]["gradient_checkpointing"] = values if values != values[:1] * trainers else values[0]
    tree["schedule"]["tsp"]["batch"] = batch
    numbers = OmegaConf.create(tree)
    OmegaConf.set_readonly(numbers, True)
    return replace(composed, config=numbers, notes=(*composed.notes, *without_effect(numbers)))


def without_effect(config: Any) -> Iterator[str]:
    """A line for each schedule setting that has no effect with the settled allocation and the other settings."""
    schedule, trainers, rollouts = config.schedule, config.allocation.trainers, config.allocation.rollouts
    groups = config.data.prompts_per_batch // config.algorithm.updates_per_batch
    idle = "schedule.{}: has no effect here, because {}.".format
    if schedule.tag and rollouts == 0:
        yield idle("tag = true", "colocated ranks take turns at generating and training")
    if schedule.handoff and rollouts == 0:
        yield idle("handoff = true", "colocated ranks hand nothing over")
    elif schedule.handoff and schedule.claims == "split":
        yield idle("handoff = true", "with schedule.claims=split no rank takes over another's tasks")
    elif schedule.handoff and rollouts == 1 and not schedule.tag:
        yield idle("handoff = true", "only one rank generates")
    if schedule.tsp.shard and trainers == 1:
        yield idle("tsp.shard = true", "only one rank trains")
    if schedule.gap > groups:
        yield idle(f"gap = {schedule.gap}", f"an update has {groups} groups: it is the same as {groups}")
    if schedule.order == "arrival" and not 0 < schedule.gap < groups:
        yield idle("order = arrival", f"with schedule.gap={schedule.gap} an update is one fragment")
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


def _steps_that_fit(costing: Costing, candidate: Candidate, steps: int) -> int:
    """`schedule.tsp.batch` = auto: of the values that fit, the one whose blocks the trainers finish first."""
    fitting = [
        trial for batch in range(1, steps + 1) if not costing.trainer_misfits(trial := candidate.but(tsp_batch=batch))
    ]
    if not fitting:
        (reason, *_) = costing.trainer_misfits(candidate.but(tsp_batch=1))
        raise ValueError(
            f"{reason} with one step per forward: set parallel.sharding=fsdp, model.gradient_checkpointing=auto or a "
            "smaller sampling.task_size; `make plan` searches for a split that fits."
        )

    def seconds(trial: Candidate) -> float:
        return sum(training_floor(costing.spec(trial), costing.cluster(trial)))

    return min(fitting, key=lambda trial: (round(seconds(trial), 4), -trial.spec.tsp_batch)).spec.tsp_batch


def sized(composed: Composed) -> bool:
    """Whether the model is a real build whose sizes have been counted, on pools whose memory is known."""
    config: Any = composed.config
    counted = composed.choices.get("model") in facts()["models"] and config.model.get("build") == "real"
    return counted and all(pool.get("memory_gib") for pool in config.hardware.pools.values())


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
    for rank in cluster.ranks:
        seconds = {"generate": rank.task_seconds(config.sampling.steps)}
        if rank.role == "trainer":
            seconds |= {"train": rank.cell_seconds, "switch": cluster.switch_seconds}
            seconds["generate"] += rank.encode_seconds if rollouts else 0.0  # a loan encodes its prompt again
        expected |= {(stage, rank.rank): scale * value for stage, value in seconds.items()}
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
    return lines


def _parts(use: Memory) -> str:
    held = {name: size / GIB for name, size in vars(use).items()}
    return ", ".join(f"{name} {gib:.1f}" for name, gib in held.items() if gib >= 0.05)


def costing_of(composed: Composed) -> Costing:
    """The experiment on its hardware profile; raises ValueError for a model without counted sizes."""
    return Costing(workload(composed), parse_hardware(composed.config.hardware))


def workload(composed: Composed) -> Workload:
    """The experiment's numbers. Raises ValueError for a model without counted sizes."""
    config: Any = composed.config
    model_name = composed.choices["model"]
    if model_name not in facts()["models"]:
        raise ValueError(
            f"model={model_name} has no counted sizes to plan with (known: {', '.join(sorted(facts()['models']))}). A "
            "small one is measured faster than planned: `python -m digenrl.cli.train "
            f"experiment={composed.choices['experiment']} hardware={composed.choices['hardware']} max_rl_steps=3` ends "
            "with step_s in summary.json. A large one is counted by benchmarks/count_facts.py, once."
        )
    sampling, algorithm, model = config.sampling, config.algorithm, config.model
    lora = model.get("lora")
    embedded = float(model.get("true_cfg_scale", 1.0)) > 1.0 if "true_cfg_scale" in model else None
    guided = float(sampling.guidance_scale or 1.0) > 1.0 if embedded is None else embedded
    return Workload(
        model=model_name,
        height=sampling.height,
        width=sampling.width,
        frames=sampling.frames,
        steps=sampling.steps,
        trained_steps=trained_steps(config),
        prompts=config.data.prompts_per_batch,
        group_size=config.data.group_size,
        updates=algorithm.updates_per_batch,
        guidance=guided,
        lora_rank=int(lora.rank) if lora else None,
        lora_targets="attn" if lora and lora.get("targets") == "attention" else "attn_ff",
        reference=float(algorithm.get("kl_weight") or 0.0) > 0.0,
        ema=algorithm.get("ema") is not None,
        rewards=tuple(config.reward.get("rewards", {})),
        engine="compiled" if model.get("compile") else "eager",
        fused_attention=bool(model.get("attention_backend")),
        storage_bytes=_STORAGE[sampling.storage_dtype],
    )


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
        sharding=config.parallel.sharding,
        shard_group=config.parallel.shard_group if isinstance(config.parallel.shard_group, int) else None,
        recompute=None if asked == AUTO else parse_recompute(asked),
        encoders=not config.model.get("offload_encoders", True),
        shares=config.schedule.shares != "equal",
        static_claims=config.schedule.claims == "split",
    )
