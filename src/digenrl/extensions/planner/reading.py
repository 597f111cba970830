"""Read a configuration for the planner: as a `Workload`, a `Candidate`, and a `Costing` on the
hardware profile."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from digenrl.advisor import named_keys
from digenrl.config import Composed, config_directory
from digenrl.config.relations import most_rollouts, needs_whole_batch, needs_whole_groups
from digenrl.config.settings import Settings
from digenrl.extensions.planner.candidate import Candidate, Choices
from digenrl.extensions.planner.costing import Costing
from digenrl.extensions.planner.measured import with_measured
from digenrl.extensions.planner.memory import USABLE, rollout_memory
from digenrl.extensions.planner.workload import BASE_BYTES, Drawn, Workload, counted_models
from digenrl.hardware import parse_hardware
from digenrl.recompute import AUTO, parse_recompute
from digenrl.rewards.needs import placed_scorers
from digenrl.schedule import ScheduleSpec
from digenrl.settle import (
    compile_problem,
    evaluation_nodes,
    schedule_of,
    sharding_mode,
    steps_within_bound,
    trained_steps,
    trainers_must_evaluate,
)

_WITH_BASE = (".DPO", ".OfflineDPO", ".DGPO")
"""End the `_target_` of algorithms that always compare with the base model."""
_IN_PAIRS = ".DPO"
"""Ends the `_target_` of the algorithm that trains pairs of its tasks alone."""
_FROM_START = (".AWM", ".DecoupledPPO")
"""End the `_target_` of algorithms and surrogates that compare later updates of a batch with the
weights before its first."""
_STORAGE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

_Choice = Literal[
    "sharding",
    "context",
    "task_size",
    "recompute",
    "encoders",
    "gap",
    "static_claims",
    "tsp_batch",
    "tsp_shard",
    "tag",
    "shares",
    "stale_fraction",
]
CHOICES: Mapping[str, _Choice] = {
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


def has_counted_sizes(composed: Composed) -> bool:
    """Return whether the model is a real build with counted sizes."""
    known = composed.choices.get("model") in counted_models()
    return known and composed.settings.model.get("build") == "real"


def costing_of(composed: Composed) -> Costing:
    """Return the costing of the experiment on its hardware profile. Raises ValueError for a model
    without counted sizes."""
    work, folder = workload_of(composed), config_directory() / "hardware" / "measured"
    return Costing(work, with_measured(parse_hardware(composed.settings.hardware), work, folder))


def workload_of(composed: Composed) -> Workload:
    """Return the experiment's workload. Raises ValueError for a model without counted sizes."""
    settings = composed.settings
    model_name = composed.choices["model"]
    if model_name not in counted_models():
        raise ValueError(
            f"model={model_name} has no counted sizes to plan with (known: "
            f"{', '.join(sorted(counted_models()))}). A small one is measured faster than planned: "
            f"`digenrl train experiment={composed.choices['experiment']} "
            f"hardware={composed.choices['hardware']} max_rl_steps=3` ends with step_s in "
            "summary.json. A large one is counted by benchmarks/count_facts.py, once."
        )
    sampling, algorithm, model = settings.sampling, settings.algorithm, settings.model
    lora, branch_scale = model.lora, model.get("true_cfg_scale")
    embedded = None if branch_scale is None else float(branch_scale) > 1.0
    judged = tuple(name for _, name, _ in placed_scorers(settings.node_at("reward"), "managed"))
    drawn = [int(node.get("samples_per_prompt", 0)) for node in evaluation_nodes(settings)]
    kept = drawn_of(settings)
    guided = float(sampling.guidance_scale or 1.0) > 1.0 if embedded is None else embedded
    work = Workload(
        model=model_name,
        height=sampling.height,
        width=sampling.width,
        frames=sampling.frames,
        steps=sampling.steps,
        trained_steps=trained_steps(settings),
        prompts=settings.data.groups_per_step,
        oversample=settings.data.oversample,
        group_size=settings.data.group_size,
        updates=algorithm.updates_per_batch,
        updates_split=settings.data.updates_split,
        guidance=guided,
        lora_rank=int(lora.rank) if lora else None,
        trained_samples=_trained_samples(settings),
        stored_prompts=settings.data.prompt_store is not None,
        whole_batch=needs_whole_batch(settings.node_at("algorithm.advantage")),
        most_text=model.get("max_sequence_length"),
        lora_targets="attn" if lora and lora.get("targets") == "attention" else "attn_ff",
        reference=_compares_with_base(settings),
        old_forwards=old_forwards(settings),
        weight_copies=_weight_copies(settings),
        sampling_parameters=_adapter_numbers(sampling.lora),
        whole_groups=needs_whole_groups(algorithm.target, settings.node_at("reward")),
        ema=algorithm.get("ema") is not None,
        rewards=tuple(name for name in settings.reward.rewards or {} if name not in judged),
        judged=judged,
        heldout=tuple(name for name in settings.reward.get("heldout") or {} if name not in judged),
        relayed=settings.launch != "ray",
        compressed=settings.network.compress == "auto",
        gradient_share=settings.parallel.compress,
        evaluated_samples=0 if kept is None else kept.prompts * kept.samples,
        evaluated=max((sampling.eval.batch or n for n in drawn), default=0),
        detached=guided and bool(algorithm.detach_uncond),
        engine="compiled" if model.compile else "eager",
        fused_attention=model.get("attention_backend", AUTO) not in (None, AUTO),
        base_bytes=BASE_BYTES[model.quantize],
        storage_bytes=_STORAGE[sampling.storage_dtype],
    )
    too_coarse = compile_problem(settings, work.latent_elements)
    if model.compile and too_coarse is not None:
        raise ValueError(too_coarse)
    work = replace(
        work,
        most_tsp_batch=steps_within_bound(settings, work.latent_elements),
        compiles=too_coarse is None,
    )
    most = most_rollouts(settings.allocation.rollouts)
    able = (
        bool(drawn)
        and trainers_must_evaluate(settings, most if isinstance(most, int) else 1) is None
    )
    asked = settings.allocation.evaluation == "rollouts"
    return replace(
        work,
        rollouts_evaluate=able and (asked or _has_room(settings, work)),
        evaluation_auto=settings.allocation.evaluation == AUTO,
    )


def drawn_of(settings: Settings) -> Drawn | None:
    """Return what one evaluation draws; None without an evaluation."""
    if (settings.callbacks or {}).get("evaluation") is None:
        return None
    evaluation, model = settings.node_at("callbacks.evaluation"), settings.model
    samples = int(evaluation.get("samples_per_prompt", 1))
    return Drawn(
        prompts=evaluation.get("max_prompts") or settings.data.prompts_per_batch,
        samples=samples,
        steps=evaluation.get("steps") or settings.sampling.steps,
        compared=min(int(evaluation.get("kl_samples", 1)), samples)
        if model.lora or model.get("keep_reference")
        else 0,
    )


def _compares_with_base(settings: Settings) -> bool:
    """Return whether each trained cell takes a forward of the base model."""
    algorithm = settings.algorithm
    return algorithm.target.endswith(_WITH_BASE) or (algorithm.kl_weight or 0.0) > 0.0


def _follows_old_policy(settings: Settings) -> bool:
    """Return whether each trained cell takes a forward of an old policy. AWM takes none without its
    weight, DGPO none without a clip."""
    algorithm = settings.algorithm
    needed = algorithm.get("old_weight", 1.0) and algorithm.get("ratio_clip", 1.0) is not None
    return algorithm.get("old_policy") is not None and bool(needed)


def _keeps_batch_start(settings: Settings) -> bool:
    """Return whether later updates of a batch are compared with the weights before its first."""
    algorithm = settings.algorithm
    surrogate = str((algorithm.get("surrogate") or {}).get("_target_", ""))
    asks = algorithm.target.endswith(_FROM_START) or surrogate.endswith(_FROM_START)
    return asks and algorithm.updates_per_batch > 1


def old_forwards(settings: Settings) -> float:
    """Return the forwards without gradient of a trained cell by earlier weights, as
    `Workload.old_forwards`."""
    updates, taught = settings.algorithm.updates_per_batch, settings.algorithm.get("teachers")
    start = _keeps_batch_start(settings) * (updates - 1) / updates
    return _follows_old_policy(settings) + start + len(taught or ())


def _weight_copies(settings: Settings) -> int:
    algorithm = settings.algorithm
    copies = int(algorithm.get("old_policy") is not None) + _keeps_batch_start(settings)
    refreshed = algorithm.get("reference_every") is not None
    return copies + refreshed + len(algorithm.get("teachers") or ())


def _adapter_numbers(path: str | None) -> int:
    """Return how many numbers the files of an adapter hold; 0 where they are not on this machine.

    Raises:
        ValueError: a file is no safetensors file.
    """
    if path is None:
        return 0
    named = Path(os.path.expanduser(path))
    last = named / "checkpoints" / "last" / "policy.safetensors"
    files = (
        [named] if named.is_file() else [last] if last.is_file() else named.glob("*.safetensors")
    )
    total = 0
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:
                names = list(opened.keys())
                shapes = [opened.get_slice(name).get_shape() for name in names]
        except SafetensorError as error:
            raise ValueError(
                f"sampling.lora = {path}: {file} is no safetensors file: {error}"
            ) from error
        total += sum(math.prod(shape) for shape in shapes)
    return total


def _trained_samples(settings: Settings) -> int | None:
    """Return how many samples of a group are trained, None for all.

    Online DPO takes `pairs` pairs of each task. Elsewhere it is 2k where three settings hold: only
    the k best and k worst have an advantage, no loss term needs the others, and cells without a
    gradient are skipped.
    """
    group, size = settings.data.group_size, settings.sampling.task_size
    if settings.algorithm.target.endswith(_IN_PAIRS):
        pairs = 2 * int(settings.algorithm.get("pairs") or 1)
        tasks = 1 if isinstance(size, str) else -(-group // size)
        return pairs * tasks if pairs * tasks < group else None
    k = settings.algorithm.advantage.get("best_and_worst")
    skips = (
        settings.schedule.skip_zero
        and settings.algorithm.holds_key("surrogate")
        and not settings.algorithm.kl_weight
    )
    return 2 * k if k and skips and 2 * k < group else None


def _has_room(settings: Settings, work: Workload) -> bool:
    """Return whether the samples of an evaluation fit beside the model on every GPU that may be a
    rollout's."""
    pools = [pool for pool in parse_hardware(settings.hardware).pools if pool.role != "trainer"]
    stay, size = not settings.model.get("offload_encoders", True), settings.sampling.task_size
    rows = 1 if isinstance(size, str) else size
    need = rollout_memory(replace(work, rollouts_evaluate=True), rows, stay).gib
    return all(need <= USABLE * pool.memory_gib for pool in pools)


def candidate_of(settings: Settings, trainers: int, rollouts: int, trained: int) -> Candidate:
    """Return the candidate that the configuration describes, with `trained` trained denoising
    steps."""
    asked: Any = settings.model.gradient_checkpointing or False
    if isinstance(asked, list):
        asked = AUTO  # settled for each trainer before; the planner's own choice gives the same
    return Candidate(
        trainers,
        rollouts,
        replace(schedule_of(settings, trained), shares=(), measured_shares=False),
        sharding=sharding_mode(settings),
        shard_group=settings.parallel.shard_group
        if isinstance(settings.parallel.shard_group, int)
        else None,
        recompute=None if asked == AUTO else parse_recompute(asked),
        encoders=not settings.model.get("offload_encoders", True),
        shares=settings.schedule.shares != "equal",
        static_claims=settings.schedule.claims == "split",
    )


def fixed_choices(composed: Composed, costing: Costing) -> Choices:
    """Return the choices that the planner must keep, as `make_plan` takes them.

    These are the keys of the command line, and values that are neither `auto` nor off.
    """
    settings = composed.settings
    trainers, rollouts = settings.allocation.trainers, most_rollouts(settings.allocation.rollouts)
    gpus = costing.hardware.gpus
    fixed: Choices = {"skip_zero": settings.schedule.skip_zero}
    if isinstance(trainers, int):
        fixed["trainers"] = trainers
        fixed["rollouts"] = rollouts if isinstance(rollouts, int) else max(0, gpus - trainers)
    elif isinstance(rollouts, int):
        fixed["trainers"], fixed["rollouts"] = gpus - rollouts, rollouts
    candidate = candidate_of(settings, 1, 0, costing.work.trained_steps)
    values = {**vars(candidate.spec), **vars(candidate)}
    usual = {each.name: each.default for kind in (ScheduleSpec, Candidate) for each in fields(kind)}
    for key, name in CHOICES.items():
        differs = usual[name] is not MISSING and values[name] != usual[name]
        if attrgetter(key)(settings) != AUTO and (key in named_keys(composed) or differs):
            fixed[name] = values[name]
    return fixed
