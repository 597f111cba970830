"""Rules of samples, groups and updates: what a batch is made of."""

from __future__ import annotations

from collections.abc import Iterator

from digenrl.config.relations.view import Rule, View, divisors, needs_whole_batch


def _task_size(get: View) -> Iterator[str]:
    size, group = get("sampling.task_size"), get("data.group_size")
    if size != "auto" and group % size:
        yield (
            f"sampling.task_size = {size}: must divide data.group_size = {group}; allowed: auto, "
            f"{divisors(group)}."
        )


def _updates_within(get: View) -> Iterator[str]:
    size, group, updates = (
        get("sampling.task_size"),
        get("data.group_size"),
        get("algorithm.updates_per_batch"),
    )
    # Updates by groups have a rule of their own (`_update_count`).
    if get("data.updates_split") != "samples":
        return
    if group % updates:
        yield (
            f"algorithm.updates_per_batch = {updates} with data.updates_split = samples: each "
            "update takes as many samples of every group, so it must divide data.group_size = "
            f"{group}; allowed: {divisors(group)}."
        )
    elif size != "auto" and group // updates % size:
        yield (
            f"sampling.task_size = {size} with data.updates_split = samples: no task may have "
            f"samples of two updates, and each of the {updates} takes {group // updates} samples "
            f"of a group; allowed: auto, {divisors(group // updates)}."
        )


def _update_count(get: View) -> Iterator[str]:
    updates, prompts = get("algorithm.updates_per_batch"), get("data.prompts_per_batch")
    if get("data.updates_split") != "groups":
        return
    if prompts % updates:
        yield (
            f"algorithm.updates_per_batch = {updates}: must divide data.prompts_per_batch = "
            f"{prompts}; allowed: {divisors(prompts)}; or data.updates_split=samples, each taking "
            "some samples of every group."
        )
    if (oversample := get("data.oversample")) % updates:
        yield (
            f"data.oversample = {oversample}: each of algorithm.updates_per_batch = {updates} "
            f"takes an equal part of it; allowed: 0, {updates}, {2 * updates}, ..."
        )


def _batch_wide_statistics(get: View) -> Iterator[str]:
    advantage, gap = get("algorithm.advantage"), get("schedule.gap")
    # With gap 0 the batch is one fragment, and all its rewards are there.
    if gap and needs_whole_batch(advantage):
        renormalise = bool(advantage.get("renormalise"))
        key, value, other = (
            ("renormalise", "true", "false") if renormalise else ("std", advantage["std"], "group")
        )
        yield (
            f"algorithm.advantage.{key} = {value} needs every reward of the batch before the first "
            f"gradient, but schedule.gap = {gap} trains groups as they complete; set "
            f"schedule.gap=0 or algorithm.advantage.{key}={other}."
        )


def _same_noise(get: View) -> Iterator[str]:
    if get("sampling.same_noise") and get("algorithm.sde.noise_level") == 0:
        yield (
            "sampling.same_noise = true with algorithm.sde.noise_level = 0: without noise on the "
            "way all samples of a "
            "group are the same picture, which teaches nothing; set sampling.same_noise=false."
        )


def _trainer_precision(get: View) -> Iterator[str]:
    # Lightning spells fp32 in three ways. Any other value casts weights or activations.
    if (precision := get("trainer.precision")) not in ("32-true", "32", 32):
        yield (
            f"trainer.precision = {precision}: trainers would compute otherwise than rollouts, and "
            "ratios leave 1; set model.dtype (bfloat16, float32, float64), in which both compute, "
            "and leave trainer.precision=32-true."
        )


def _scout_candidates(get: View) -> Iterator[str]:
    candidates = get("sampling.scouts.candidates")
    if candidates > 1 and get("sampling.same_noise"):
        yield (
            f"sampling.scouts.candidates = {candidates} with sampling.same_noise = true: scouts "
            "choose among initial noises, and there is one; set sampling.same_noise=false."
        )
    if candidates > 1 and get("sampling.task_size") == 1:
        yield (
            f"sampling.scouts.candidates = {candidates} with sampling.task_size = 1: a task keeps "
            "its best and its worst samples, and has one; set sampling.task_size to 2 or more."
        )


_INSTEAD = (
    "checkpoints are written by callbacks.checkpoint (set callbacks.checkpoint.every), and the "
    "newest is checkpoints/last"
)


def _checkpoints_of_lightning(get: View) -> Iterator[str]:
    # They would count micro-batches, and move checkpoints/last to files that no run resumes from.
    if get("trainer.enable_checkpointing"):
        yield (
            f"trainer.enable_checkpointing = true: {_INSTEAD}; leave trainer.enable_checkpointing="
            "false."
        )
    for name, callback in (get("callbacks") or {}).items():
        target = str(callback.get("_target_"))
        if target.endswith((".ModelCheckpoint", ".OnExceptionCheckpoint")):
            yield (f"callbacks.{name}._target_ = {target}: {_INSTEAD}; remove callbacks.{name}.")


RULES: tuple[Rule, ...] = (
    _task_size,
    _updates_within,
    _update_count,
    _batch_wide_statistics,
    _same_noise,
    _trainer_precision,
    _checkpoints_of_lightning,
    _scout_candidates,
)
