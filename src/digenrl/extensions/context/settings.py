"""Checks of `parallel.context`: between keys, and of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from digenrl.config.relations import divisors
from digenrl.facts import families


def context_problems(get: Callable[[str], Any]) -> Iterator[str]:
    """Yield the reasons why a configuration cannot have the context groups that it asks for."""
    context, trainers = get("parallel.context"), get("allocation.trainers")
    if context == 1:
        return
    if isinstance(trainers, int) and trainers % context:
        yield (
            f"parallel.context = {context}: must divide allocation.trainers = {trainers}; "
            f"allowed: {divisors(trainers)}."
        )
    if get("schedule.shares") != "equal":
        yield (
            f"schedule.shares = {get('schedule.shares')} with parallel.context = {context}: "
            "trainers that share the tokens of a forward are equally fast; set "
            "schedule.shares=equal, or parallel.context=1."
        )
    for name, pool in get("hardware.pools").items():
        node = pool.get("per_node", min(pool.get("count", 1), 8))
        if pool.get("gpu") != "cpu" and pool.get("role", "auto") != "rollout" and node % context:
            yield (
                f"parallel.context = {context}: the {node} GPUs of a node of hardware.pools.{name} "
                f"do not divide into groups of {context}; allowed: {divisors(node)}."
            )


def check_model(policy: Any, config: Any) -> None:
    """Refuse a model whose forwards `parallel.context` trainers cannot compute together.

    Args:
        policy: class of the model, a `digenrl.models.policy.Policy`.
        config: a checked configuration.

    Raises:
        ValueError: the family's tokens are not divided, the ranks do not divide its attention heads
            and the tokens of a sample, or its blocks are compiled.
    """
    ranks, settings = config.parallel.context, config.model
    if not policy.context_plan:
        able = ", ".join(family for family, facts in families().items() if facts.context)
        raise ValueError(
            f"parallel.context = {ranks}: the tokens of {policy.family} are not divided among "
            f"trainers, those of {able} can be; set parallel.context=1 (parallel.sharding=fsdp "
            "saves memory too)."
        )
    heads = policy.network_config(settings)["num_attention_heads"]
    shape = policy._latent_shape(settings.height, settings.width, settings.get("frames", 1))
    tokens = math.prod(shape[1:]) * policy.vae_stride**2 // policy.spatial_stride**2
    common = [n for n in range(1, heads + 1) if heads % n == 0 and tokens % n == 0]
    if ranks not in common:
        raise ValueError(
            f"parallel.context = {ranks}: must divide the {heads} attention heads of "
            f"{policy.family} and the {tokens} tokens of a sample of this size; allowed: "
            f"{', '.join(map(str, common))}."
        )
    if settings.get("compile"):
        raise ValueError(
            f"parallel.context = {ranks} with model.compile = true: compiled blocks cannot be "
            "divided; set one of them back."
        )
