"""What is settled and said before anything is allocated: `auto` values as numbers, and the memory of each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf

from digenrl.cli.plan import trained_steps, workload
from digenrl.config import Composed
from digenrl.simulate import hardware
from digenrl.simulate.candidate import Bench, Candidate
from digenrl.simulate.hardware import Hardware
from digenrl.simulate.memory import Memory
from digenrl.simulate.workload import facts


def allocation(config: Any, processes: int | None = None) -> tuple[int, int]:
    """(trainers, rollouts) with every `auto` resolved: from the number of `processes` when somebody else started them,
    else from the hardware profile's pools. A pool's role says what its devices do; devices without a role are shared
    evenly, and on processors one of each is the default."""
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


def settled(composed: Composed, trainers: int, rollouts: int) -> Composed:
    """The configuration with allocation and `schedule.tsp.batch` as numbers.

    `auto` steps per forward are the most that the memory model fits into the smallest trainer of the profile; all of
    them where the model's sizes or the pools' memory are not known.

    Raises:
        ValueError: not even one step per forward fits; gives the estimate, the pool and what to change.
    """
    config: Any = composed.config
    steps = trained_steps(config.algorithm.get("train_steps") or {}, config.sampling.steps)
    asked = config.schedule.tsp.batch
    batch = min(asked, steps) if isinstance(asked, int) else steps
    limit = _smallest_trainer(config.hardware.pools)
    if asked == "auto" and limit is not None and sized(composed):
        fitting = [k for k in range(1, steps + 1) if _trainer(composed, trainers, rollouts, k).gib <= limit]
        if not fitting:
            need = _trainer(composed, trainers, rollouts, 1).gib
            raise ValueError(
                f"a trainer needs about {need:.1f} GiB with one step per forward, and the smallest has {limit:g} GiB: "
                "set parallel.sharding=fsdp, model.gradient_checkpointing=true or a smaller sampling.task_size; "
                "`make plan` searches for a split that fits."
            )
        batch = max(fitting)
    tree = OmegaConf.to_container(config)
    assert isinstance(tree, dict)
    tree["schedule"]["tsp"]["batch"] = batch
    tree["allocation"] |= {"trainers": trainers, "rollouts": rollouts}
    numbers = OmegaConf.create(tree)
    OmegaConf.set_readonly(numbers, True)
    return replace(composed, config=numbers)


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
    profile = hardware.parse_hardware(config.hardware)
    pools = [profile.pool(name) for name, _ in hardware.assign(profile, trainers, rollouts)[:trainers]]
    measured = profile.seconds.get("train", {})
    if all(pool.name in measured for pool in pools):
        return tuple(1.0 / measured[pool.name] for pool in pools)
    return tuple(pool.tflops for pool in pools)


def sized(composed: Composed) -> bool:
    """Whether the model is a real build whose sizes have been counted."""
    config: Any = composed.config
    return composed.choices.get("model") in facts()["models"] and config.model.get("build") == "real"


def memory_lines(composed: Composed, trainers: int, rollouts: int) -> list[str]:
    """What each role's rank will hold, in GiB, by what holds it; nothing for models without counted sizes."""
    if not sized(composed):
        return []
    table = _bench(composed).memory(_candidate(composed, trainers, rollouts, composed.config.schedule.tsp.batch))
    return [f"memory    {role}: {use.gib:.1f} GiB ({_parts(use)})" for role, use in table.items()]


def _parts(use: Memory) -> str:
    names = ("frozen", "trained", "gradients", "optimizer", "copies", "gathered", "activations", "workspace")
    held = {name: getattr(use, name) / 2**30 for name in names}
    return ", ".join(f"{name} {gib:.1f}" for name, gib in held.items() if gib >= 0.05)


def _smallest_trainer(pools: Mapping[str, Any]) -> float | None:
    """GiB of the smallest device that may train; None where a pool does not say."""
    sizes = [pool.get("memory_gib") for pool in pools.values() if pool.get("role", "auto") != "rollout"]
    return None if not sizes or None in sizes else float(min(sizes))


def _trainer(composed: Composed, trainers: int, rollouts: int, batch: int) -> Memory:
    return _bench(composed).memory(_candidate(composed, trainers, rollouts, batch))["trainer"]


def _bench(composed: Composed) -> Bench:
    return Bench(workload(composed), Hardware(()))


def _candidate(composed: Composed, trainers: int, rollouts: int, batch: int) -> Candidate:
    config: Any = composed.config
    hsdp = config.parallel.sharding == "hsdp"  # a rank holds what it would hold if its group were alone
    return Candidate(
        shard_group(config, trainers) if hsdp else trainers,
        rollouts,
        sharding="fsdp" if hsdp else config.parallel.sharding,
        task_size=config.sampling.task_size,
        tsp_batch=batch,
        checkpointing=bool(config.model.get("gradient_checkpointing", False)),
        tag=config.schedule.tag,
    )
