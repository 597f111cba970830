"""Find settings with which a run fits into memory, for its own split of the ranks or for another
split."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from digenrl.extensions.planner.candidate import Candidate, Choices
from digenrl.extensions.planner.costing import Costing
from digenrl.extensions.planner.enumeration import context_sizes, is_allowed

CHANGES: tuple[tuple[str, Choices], ...] = (
    ("schedule.tsp.batch=1", {"tsp_batch": 1}),
    ("model.gradient_checkpointing=auto", {"recompute": None}),
    ("parallel.sharding=fsdp", {"sharding": "fsdp"}),
    ("model.offload_encoders=true", {"encoders": False}),
    ("sampling.task_size=1", {"task_size": 1}),
)
"""Settings that need less memory, the cheapest first: words of a command line, and choices of a
candidate."""


def find_remedy(costing: Costing, candidate: Candidate) -> str:
    """Return a sentence with the fewest settings that make `candidate` fit, or with advice if no
    settings do."""
    work, hardware = costing.work, costing.hardware
    ways = (
        ("", costing),
        (
            "sampling.eval.batch=1 ",
            Costing(replace(work, evaluated=min(1, work.evaluated)), hardware),
        ),
        (
            "allocation.evaluation=trainers ",
            Costing(replace(work, rollouts_evaluate=False), hardware),
        ),
        ("model.quantize=nf4 parallel.sharding=ddp ", costing.quantized),
        ("parallel.compress=off ", Costing(replace(work, gradient_share="off"), hardware)),
    )
    for said, way in ways:
        if (words := _fitting_changes(way, candidate)) is not None:
            return f"set {said}{' '.join(words)}".rstrip() + "."
    return (
        "no split of this profile's GPUs fits, however its ranks hold the model: train LoRA "
        "(model.lora), take a smaller resolution or fewer frames, use more or larger GPUs, or "
        "correct memory_gib or host_gib of the profile's pools."
    )


def _fitting_changes(costing: Costing, candidate: Candidate) -> list[str] | None:
    """Return the settings to name in `find_remedy`, or None if no settings make the candidate
    fit."""
    tokens: list[tuple[str, Choices]] = [
        (f"parallel.context={n}", {"context": n}) for n in context_sizes(costing, candidate)[-1:]
    ]
    known = [
        (word, change)
        for word, change in (*CHANGES, *tokens)
        if candidate.with_changes(**change) != candidate
    ]
    for count in range(len(known) + 1):
        for chosen in itertools.combinations(known, count):
            if _is_startable(costing, _with_all(candidate, chosen)):
                return [word for word, _ in chosen]
    smallest, gpus = _with_all(candidate, CHANGES), costing.hardware.gpus
    for trainers in range(gpus, 0, -1):
        sharding = "fsdp" if trainers > 1 else "ddp"
        split = smallest.with_changes(
            trainers=trainers, rollouts=gpus - trainers, sharding=sharding
        )
        for context in (1, *context_sizes(costing, split)[-1:]):
            if not _is_startable(costing, split.with_changes(context=context)):
                continue
            words = [f"allocation.trainers={trainers}", f"allocation.rollouts={gpus - trainers}"]
            words += [
                w
                for w, change in known
                if w not in dict(tokens) and (trainers > 1 or "sharding" not in change)
            ]
            words += [f"parallel.context={context}"] * (context != candidate.spec.context)
            return words
    return None


def _is_startable(costing: Costing, candidate: Candidate) -> bool:
    """Return whether a run accepts `candidate`, and it fits."""
    return is_allowed(costing, candidate) and not costing.find_misfits(candidate)


def _with_all(candidate: Candidate, changes: Sequence[tuple[str, Choices]]) -> Candidate:
    for _, change in changes:
        candidate = candidate.with_changes(**change)
    return candidate
