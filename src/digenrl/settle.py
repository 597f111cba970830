"""Settle a configuration before anything is built: `auto` values become numbers, and
contradictions are refused.

What needs costs, memory or a simulation is the `Advisor`'s to answer (advisor.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from digenrl import hardware
from digenrl.advisor import Advisor, ModelPlacement
from digenrl.config import Composed
from digenrl.config.no_effect import without_effect
from digenrl.config.relations import most_rollouts, needs_whole_groups, relation_problems
from digenrl.config.settings import Settings
from digenrl.config.traps import known_traps
from digenrl.recompute import AUTO
from digenrl.rounding import (
    MEASURED_DIMENSIONS,
    WHOLE_PRECISION,
    first_ratio_bound,
    most_steps_per_forward,
    replay_rounding,
)
from digenrl.schedule import ScheduleSpec, slices_of_group, steps_per_forward
from digenrl.schedule.spec import KEYS

MOST_WAITING = 4
"""Trainers for each rollout up to which rollouts evaluate, where nobody knows the seconds."""
TINY_DIMENSIONS = 1_024
"""Numbers of a tiny build's latents, about."""
ROLLOUTS = "rollouts, while trainers go on"
"""Words of a run's announcement for the ranks that evaluate."""


def settle_run(composed: Composed, advisor: Advisor, processes: int | None = None) -> Composed:
    """Return the settled configuration of a run: every `auto` is a value, and notes say what was
    chosen.

    Args:
        advisor: answers what needs costs, memory or a simulation.
        processes: ranks that torchrun or SLURM started; None: the hardware profile's pools say how
            many there are.

    Raises:
        ValueError: as `allocated_ranks` and `with_allocation`.
    """
    composed = advisor.choose_schedule(with_task_size(composed, advisor), processes)
    return with_allocation(composed, *allocated_ranks(composed.settings, processes), advisor)


def allocated_ranks(settings: Settings, processes: int | None = None) -> tuple[int, int]:
    """Return (trainers, rollouts) with every `auto` as a number. {min, max} counts as max.

    Without `processes`, the pools of the hardware profile say how many there are. A pool's role
    says what its devices do. Devices without a role are shared evenly. On processors one of each is
    the default.

    Args:
        processes: ranks that somebody else started.

    Raises:
        ValueError: {min, max} where somebody else starts a fixed number of processes.
    """
    trainers: Any = settings.allocation.trainers
    rollouts = most_rollouts(settings.allocation.rollouts)
    if processes is not None:
        if rollouts != settings.allocation.rollouts:
            raise ValueError(
                f"allocation.rollouts = {settings.allocation.rollouts}: torchrun and SLURM start a "
                "fixed number of ranks; give a number or auto and let others join (digenrl join), "
                "or start the run with launch=ray."
            )
        if trainers == "auto":
            trainers = processes - rollouts if isinstance(rollouts, int) else max(1, processes // 2)
        return int(trainers), int(processes - trainers if rollouts == "auto" else rollouts)
    counts = {"trainer": 0, "rollout": 0, "auto": 0}
    for pool in hardware.parse_hardware(settings.hardware).pools:
        counts[pool.role] += pool.count if pool.gpu != "cpu" else 2
    if trainers == "auto":
        room = counts["trainer"] + counts["auto"]
        trainers = max(
            1, room - (rollouts if isinstance(rollouts, int) else (counts["auto"] + 1) // 2)
        )
    if rollouts == "auto":
        rollouts = max(1, counts["rollout"] + counts["auto"] - max(0, trainers - counts["trainer"]))
    return int(trainers), int(rollouts)


def begins_with(settings: Settings) -> tuple[int, int]:
    """Return (trainers, rollouts) that a settled run starts; a launcher with places of its own lets
    the rest of {min, max} join when it has them."""
    trainers, most = settings.allocation.split
    span = settings.allocation.rollouts
    elastic = settings.launch != "local" and isinstance(span, dict)
    return trainers, span["min"] if elastic and isinstance(span, dict) else most


def with_task_size(composed: Composed, advisor: Advisor) -> Composed:
    """Return the configuration with a number for `sampling.task_size`.

    `auto` is a matter of model, sizes and hardware profile alone, so that samples are the same in
    every schedule. No task has samples of two updates.
    """
    settings = composed.settings
    if settings.sampling.task_size != AUTO:
        return composed
    portion = settings.data.group_size // slices_of_group(
        settings.data.updates_split, settings.algorithm.updates_per_batch
    )
    if needs_whole_groups(settings.algorithm.target, settings.node_at("reward")):
        return composed.with_values({"sampling.task_size": portion})
    sizes = [size for size in range(1, portion + 1) if portion % size == 0]
    return composed.with_values({"sampling.task_size": advisor.task_size(composed, sizes)})


def with_allocation(composed: Composed, trainers: int, rollouts: int, advisor: Advisor) -> Composed:
    """Return the configuration with this allocation, and with values for `parallel.sharding`,
    `parallel.compress`, `schedule.tsp.batch`, `model.gradient_checkpointing` and
    `allocation.evaluation`.

    For a model without known sizes, `auto` means replicas and all trained steps in one forward, as
    far as `steps_within_bound` allows.
    Real builds then recompute every block.

    Raises:
        ValueError: the numbers contradict another key, or a rank would not fit into its GPU's
            memory. The message has the estimate, the pool, and a change that fits if there is one.
    """
    settings = composed.settings
    numbers: dict[str, Any] = {"allocation.trainers": trainers}
    if most_rollouts(settings.allocation.rollouts) != rollouts:  # auto; {min, max} stays
        numbers["allocation.rollouts"] = rollouts
    evaluate = evaluating_ranks(settings, rollouts)
    if wrong := relation_problems(settings.with_values(numbers).as_plain()):
        raise ValueError("\n".join(wrong))
    numbers["parallel.compress"] = compression(settings, trainers, rollouts)
    steps = steps_per_forward(settings.schedule.tsp.batch, trained_steps(settings))
    if settings.schedule.tsp.batch == AUTO:
        tiny = settings.hardware.build == "tiny"
        steps = steps_within_bound(settings, TINY_DIMENSIONS if tiny else MEASURED_DIMENSIONS)
    few = settings.allocation.evaluation == AUTO and trainers > MOST_WAITING * rollouts
    usual = ModelPlacement(
        sharding_mode(settings),
        steps,
        settings.hardware.build == "real",
        rollouts_evaluate=not few,
        why=f"{trainers} trainers would wait for {rollouts} rollouts",
    )
    # With off or a share in place of auto: replicas must fit only where they compress.
    shared = composed.with_values({"parallel.compress": numbers["parallel.compress"]})
    held, notes = advisor.place_model(shared, trainers, rollouts, usual), composed.notes
    numbers |= {"parallel.sharding": held.sharding, "schedule.tsp.batch": held.tsp_batch}
    if settings.model.gradient_checkpointing == AUTO:
        numbers["model.gradient_checkpointing"] = held.gradient_checkpointing
    if evaluate == ROLLOUTS and not held.rollouts_evaluate:
        numbers["allocation.evaluation"] = "trainers"
        notes = (
            *notes,
            f"allocation.evaluation=trainers: {held.why}.",
        )
    if (lora := settings.sampling.lora) is not None:
        notes = (
            *notes,
            f"sampling.lora={lora}: rollouts and evaluations draw with it; training leaves it out, "
            "and so does what is exported.",
        )
    if settings.parallel.compress != "off":
        notes = (*notes, compression_note(numbers["parallel.compress"]))
    made = composed.with_values(numbers)
    return replace(
        made, notes=(*notes, *without_effect(made.settings), *known_traps(made.settings))
    )


def compression(settings: Settings, trainers: int, rollouts: int) -> float | str:
    """Return `parallel.compress` as a number, or off.

    Raises:
        ValueError: whole gradients, or gradients of shards, would cross a line between trainers.
    """
    asked, profile = settings.parallel.compress, hardware.parse_hardware(settings.hardware)
    if not profile.lines:
        return "off" if asked == AUTO else asked
    ranks = hardware.assign_ranks(profile, trainers, rollouts)
    if hardware.trainers_line(profile, ranks) is None:
        return "off" if asked == AUTO else asked
    sharding = settings.parallel.sharding
    shards = sharding in ("hsdp", "fsdp")
    if asked != "off" and not shards:
        return hardware.gradient_share(asked, profile, ranks) or "off"
    # Colocated ranks may be on any pool.
    rooms = {
        "+".join(pool.name for pool in own): sum(pool.count for pool in own)
        for place in profile.places
        if (own := [pool for pool in place if not rollouts or pool.role != "rollout"])
    }
    said, most = ", ".join(f"{name}: {room}" for name, room in rooms.items()), max(rooms.values())
    ways = ["change a pool's role"]
    # A single trainer can neither share its weights nor exchange gradients.
    if most > 1 or (asked == "off" and not shards):
        ways.insert(0, f"lower it to {most}")
    words = ["parallel.compress=auto"] * (asked == "off") + ["parallel.sharding=ddp"] * shards
    raise ValueError(
        f"allocation.trainers = {trainers} with parallel.compress = {asked} and parallel.sharding "
        f"= {sharding}: trainers exchange gradients in every update, and no place that "
        f"hardware.links joins has room for all of them ({said}); {', '.join(ways)}, or set "
        f"{' '.join(words)}, which makes updates approximate and takes replicas."
    )


def compression_note(share: float | str) -> str:
    """Return what a run says of the settled `parallel.compress` that was asked for."""
    if isinstance(share, str):
        return "parallel.compress=off: all trainers are in one place, so auto compresses nothing."
    return (
        f"parallel.compress={share:g}: updates are approximate. This share of the gradient's "
        "values travels in each, the largest ones; the others are added to the next gradient."
    )


def gradient_share(settings: Settings) -> float | None:
    """Return `parallel.compress` of a settled run as a number; None: every value travels, or
    the key is still 'auto'."""
    share = settings.parallel.compress
    return None if isinstance(share, str) else share


def steps_within_bound(settings: Settings, dimensions: int) -> int:
    """Return the largest number of denoising steps in one forward for which replay rounds less than
    a run accepts (`rounding`). Without a ratio these are all trained steps.

    Args:
        dimensions: numbers of a sample's latents.
    """
    trained, bound = trained_steps(settings), ratio_bound(settings)
    if bound is None:
        return trained
    return most_steps_per_forward(bound, compute_dtype(settings), dimensions, trained)


def compile_problem(settings: Settings, dimensions: int) -> str | None:
    """Return why compiled blocks would end the run at its first step; None: they would not. A
    compiled forward rounds otherwise than the eager one in which rollouts keep no graph."""
    bound, rounding = ratio_bound(settings), replay_rounding(1, True, dimensions)
    if bound is None or compute_dtype(settings) in WHOLE_PRECISION or rounding <= bound:
        return None
    return (
        f"model.compile = true: compiled replay rounds by about {rounding:.1e}, and "
        f"algorithm.clip_range allows {bound:.1e} (a quarter of it): set model.compile=false, or "
        f"accept it with algorithm.ratio_bound={2 * rounding:.1e}"
    )


def ratio_bound(settings: Settings) -> float | None:
    """Return what the first |ratio - 1| may reach; None for algorithms without a ratio. A surrogate
    that does not clip counts as one that does: its class is not imported, torch would come with
    it."""
    algorithm = settings.algorithm
    if not algorithm.holds_key("surrogate"):
        return None
    if (given := algorithm.get("ratio_bound")) is not None:
        return float(given)
    clip: Any = algorithm.clip_range
    pair = (clip, clip) if isinstance(clip, (int, float)) else tuple(clip)
    return first_ratio_bound(compute_dtype(settings), pair)


def compute_dtype(settings: Settings) -> str:
    """Return the dtype of forwards, as torch names it: `auto` is 16 bits for published weights."""
    dtype = str(settings.model.get("dtype"))
    tiny = settings.hardware.build == "tiny"
    return ("float32" if tiny else "bfloat16") if dtype == AUTO else dtype


def evaluating_ranks(settings: Settings, rollouts: int) -> str | None:
    """Return the ranks that evaluate, in words, with the reason where trainers do; None when no
    rank evaluates.

    Raises:
        ValueError: rollouts are asked to, and cannot.
    """
    if not evaluation_nodes(settings):
        return None
    cause = trainers_must_evaluate(settings, rollouts)
    if cause is not None and settings.allocation.evaluation == "rollouts":
        raise ValueError(
            f"allocation.evaluation = rollouts: cannot be, because {cause}; set "
            "allocation.evaluation=auto, with which trainers evaluate there."
        )
    return ROLLOUTS if cause is None else f"trainers ({cause})"


def trainers_must_evaluate(settings: Settings, rollouts: int) -> str | None:
    """Return the reason why trainers must evaluate, or None if rollouts can. Rollouts hold weights
    in the dtype to which every forward casts them, so their samples are the same."""
    if settings.allocation.evaluation == "trainers":
        return "allocation.evaluation=trainers says so"
    if rollouts == 0:
        return "no rank only generates"
    if len(evaluation_nodes(settings)) > 1:
        return (
            f"there are {len(evaluation_nodes(settings))} evaluations among the callbacks, "
            "and rollouts make one"
        )
    copied = settings.model.get("keep_reference") and settings.model.lora is None
    if copied and any(node.get("kl_samples", 1) for node in evaluation_nodes(settings)):
        return (
            "trainers alone keep the base model, and callbacks.evaluation.kl_samples asks for the "
            "distance to it"
        )
    return None


def evaluation_nodes(settings: Settings) -> list[Any]:
    """Return the evaluations among the callbacks."""
    return [
        node
        for node in (settings.callbacks or {}).values()
        if str(node["_target_"]).endswith("Evaluation")
    ]


def sharding_mode(settings: Settings) -> str:
    """Return `parallel.sharding`, or 'ddp' while it is still 'auto'."""
    return "ddp" if settings.parallel.sharding == AUTO else str(settings.parallel.sharding)


def shard_group(settings: Settings, trainers: int) -> int:
    """Return `parallel.shard_group` as a number. `auto` follows the smallest node of the pools that
    may train."""
    if isinstance(settings.parallel.shard_group, int):
        return int(settings.parallel.shard_group)
    pools = hardware.parse_hardware(settings.hardware).pools
    nodes = [pool.per_node for pool in pools if pool.role != "rollout"]
    return hardware.shard_group(trainers, min(nodes, default=trainers))


def schedule_of(
    settings: Settings, trained_steps: int, speeds: Sequence[float] = ()
) -> ScheduleSpec:
    """Return the schedule of a run.

    Args:
        trained_steps: S, as `algorithm.train_steps` counts it.
        speeds: of the trainers. With schedule.shares=measured they are the first shares.
    """
    values: dict[str, Any] = {name: attrgetter(key)(settings) for name, key in KEYS.items()}
    asked = values["shares"]
    shares = {"equal": (), "measured": speeds}[asked] if isinstance(asked, str) else asked
    values["shares"] = tuple(float(share) for share in shares)
    values["prompts"] = settings.data.groups_per_step
    values["tsp_batch"] = steps_per_forward(values["tsp_batch"], trained_steps)
    return ScheduleSpec(**values, trained_steps=trained_steps, measured_shares=asked == "measured")


def trained_steps(settings: Settings) -> int:
    """Return S, the number of denoising steps that `algorithm.train_steps` trains. Its class is
    imported, and torch if the class needs it.

    Raises:
        ValueError: the selection does not fit into sampling.steps.
    """
    try:
        return int(settings.build("algorithm.train_steps").count_trained(settings.sampling.steps))
    except ValueError as error:
        raise ValueError(
            f"algorithm.train_steps = {settings.algorithm.train_steps}: {error}"
        ) from error
