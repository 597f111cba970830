"""Rules that relate several keys. Each is a small function that yields messages.

To add a rule, add it to `_RULES`. An extension adds rules for its own keys: the `RULES` of its
package. The rules are applied twice: to the configuration as written, and again when `auto` has
become numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import accumulate, chain
from typing import Any

from digenrl.extension import offered

Tree = Mapping[str, Any]


class _Needs(Exception):
    """A key that a rule reads is absent, or was already reported."""


class _View:
    """The values of a tree that nothing was wrong with so far."""

    def __init__(self, tree: Tree, broken: Collection[str]) -> None:
        self._tree = tree
        self._broken = {
            part for key in broken for part in accumulate(key.split("."), "{}.{}".format)
        }

    def __call__(self, key: str) -> Any:
        node: Any = self._tree
        for part in key.split("."):
            if key in self._broken or not isinstance(node, Mapping) or part not in node:
                raise _Needs(key)
            node = node[part]
        return node


def most_rollouts(rollouts: Any) -> Any:
    """Return the largest number of rollouts that `allocation.rollouts` asks for: the number itself,
    or `max`; auto stays."""
    return rollouts["max"] if isinstance(rollouts, Mapping) else rollouts


def needs_whole_batch(advantage: Mapping[str, Any]) -> bool:
    """Return whether the advantages of `algorithm.advantage` need every reward of the batch. Then
    no group can be trained before the others are complete, and `schedule.gap` must be 0."""
    return advantage.get("std") in ("batch", "max_group") or bool(advantage.get("renormalise"))


def relation_problems(tree: Tree, broken: Collection[str] = ()) -> list[str]:
    """Return what is wrong between keys. Rules that read a key of `broken` stay silent."""
    view = _View(tree, broken)
    problems: list[str] = []
    for rule in chain(_RULES, *offered("RULES")):
        try:
            problems += rule(view)
        except _Needs:
            continue
    return problems


def divisors(number: int) -> str:
    """Return the divisors of a number, as messages list them."""
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def _task_size(get: _View) -> Iterator[str]:
    size, group = get("sampling.task_size"), get("data.group_size")
    if size != "auto" and group % size:
        yield (
            f"sampling.task_size = {size}: must divide data.group_size = {group}; allowed: auto, "
            f"{divisors(group)}."
        )


def _updates_within(get: _View) -> Iterator[str]:
    size, group, updates = (
        get("sampling.task_size"),
        get("data.group_size"),
        get("algorithm.updates_per_batch"),
    )
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


def _updates(get: _View) -> Iterator[str]:
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


def _batch_wide_statistics(get: _View) -> Iterator[str]:
    advantage, gap = get("algorithm.advantage"), get("schedule.gap")
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


def _same_noise(get: _View) -> Iterator[str]:
    if get("sampling.same_noise") and get("algorithm.sde.noise_level") == 0:
        yield (
            "sampling.same_noise = true with algorithm.sde.noise_level = 0: without noise on the "
            "way all samples of a "
            "group are the same picture, which teaches nothing; set sampling.same_noise=false."
        )


def _precision(get: _View) -> Iterator[str]:
    if (precision := get("trainer.precision")) not in ("32-true", "32", 32):
        yield (
            f"trainer.precision = {precision}: trainers would compute otherwise than rollouts, and "
            "ratios leave 1; set model.dtype (bfloat16, float16, float32, float64), in which both "
            "compute, and leave trainer.precision=32-true."
        )


def _asynchrony(get: _View) -> Iterator[str]:
    steps, rollouts = get("schedule.async_steps"), get("allocation.rollouts")
    if steps and rollouts == 0:
        yield (
            f"schedule.async_steps = {steps} with allocation.rollouts = 0: without rollout ranks "
            "nobody generates "
            "while others train; set allocation.rollouts to 1 or more, or schedule.async_steps=0."
        )


def _shares(get: _View) -> Iterator[str]:
    shares, trainers = get("schedule.shares"), get("allocation.trainers")
    if not isinstance(shares, list):
        return
    if sum(shares) <= 0:
        yield f"schedule.shares = {shares}: at least one share must be above 0."
    if isinstance(trainers, int) and len(shares) != trainers:
        yield (
            f"schedule.shares = {shares}: has {len(shares)} entries for allocation.trainers = "
            f"{trainers}; give one for each trainer rank, or schedule.shares=equal."
        )


def _sharding(get: _View) -> Iterator[str]:
    sharding, trainers = get("parallel.sharding"), get("allocation.trainers")
    if sharding in ("hsdp", "fsdp") and trainers == 1:
        yield (
            f"parallel.sharding = {sharding} with allocation.trainers = 1: there is nobody to "
            "share the weights with; set parallel.sharding=ddp or allocation.trainers to 2 or more."
        )


def _shard_group(get: _View) -> Iterator[str]:
    sharding, group, trainers = (
        get("parallel.sharding"),
        get("parallel.shard_group"),
        get("allocation.trainers"),
    )
    if sharding not in ("hsdp", "auto"):
        if group != "auto":
            yield (
                f"parallel.shard_group = {group} with parallel.sharding = {sharding}: only hsdp "
                "has shard groups; set parallel.sharding=hsdp, or parallel.shard_group=auto."
            )
    elif isinstance(group, int) and isinstance(trainers, int) and trainers % group:
        yield (
            f"parallel.shard_group = {group}: must divide allocation.trainers = {trainers}; "
            f"allowed: {divisors(trainers)}, or auto."
        )


def _split_claims(get: _View) -> Iterator[str]:
    if get("schedule.claims") != "split" or get("allocation.rollouts") == 0:
        return
    if isinstance(rollouts := get("allocation.rollouts"), Mapping):
        yield (
            f"allocation.rollouts = {rollouts} with schedule.claims = split: every rank has its "
            "part of the tasks, so none can join or leave; set schedule.claims=shared, or "
            "allocation.rollouts to a number."
        )
    if get("schedule.tag"):
        yield (
            "schedule.claims = split with schedule.tag = true: every rollout rank has its part of "
            "the tasks, so none "
            "is left for a trainer; set schedule.claims=shared or schedule.tag=false."
        )
    if (lost := get("allocation.max_lost_rollouts")) not in ("auto", 0):
        yield (
            f"allocation.max_lost_rollouts = {lost} with schedule.claims = split: nobody takes "
            "over the part of a rank that died; set schedule.claims=shared, or "
            "allocation.max_lost_rollouts to 0 or auto (which is 0 then)."
        )


def _recomputation(get: _View) -> Iterator[str]:
    kept, trainers = get("model.gradient_checkpointing"), get("allocation.trainers")
    if isinstance(kept, list) and isinstance(trainers, int) and len(kept) != trainers:
        yield (
            f"model.gradient_checkpointing = {kept}: has {len(kept)} entries for "
            f"allocation.trainers = {trainers}; give one for each trainer rank, or a single value."
        )


def _rank_counts(get: _View) -> Iterator[str]:
    pools = {
        name: (pool.get("count", 1), pool.get("role", "auto"))
        for name, pool in get("hardware.pools").items()
    }
    trainers, rollouts = get("allocation.trainers"), most_rollouts(get("allocation.rollouts"))
    devices = sum(count for count, _ in pools.values())
    summary = ", ".join(f"{name}: {count} ({role})" for name, (count, role) in pools.items())
    needed = sum(number if isinstance(number, int) else 1 for number in (trainers, rollouts))
    if needed > devices:
        yield (
            f"allocation.trainers = {trainers} and allocation.rollouts = {rollouts}: need {needed} "
            f"ranks, but the hardware profile has {devices} ({summary}); lower one, set it to "
            "auto, or choose another hardware."
        )
        return
    for key, number, role in (("trainers", trainers, "trainer"), ("rollouts", rollouts, "rollout")):
        room = sum(count for count, its in pools.values() if its in ("auto", role))
        if rollouts != 0 and isinstance(number, int) and number > room:
            yield (
                f"allocation.{key} = {number}: the hardware profile has {room} devices that may be "
                f"{role}s ({summary}); allowed: at most {room}."
            )


_RULES: tuple[Callable[[_View], Iterator[str]], ...] = (
    _task_size,
    _updates_within,
    _updates,
    _batch_wide_statistics,
    _same_noise,
    _precision,
    _asynchrony,
    _shares,
    _sharding,
    _shard_group,
    _split_claims,
    _recomputation,
    _rank_counts,
)
