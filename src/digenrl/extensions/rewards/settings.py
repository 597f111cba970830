"""Rules for rewards that the run starts itself (`placement: managed`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from digenrl.rewards.needs import placed


def gpus_of(node: Mapping[str, Any]) -> int:
    """Return the GPUs that a scorer takes in a process of its own, from its YAML node.

    A judge takes those of its server, a scorer with a `device` one, and others run on processors.
    """
    return int((node.get("serve") or {}).get("gpus", 1)) if "url" in node else int("device" in node)


def managed(reward: Mapping[str, Any]) -> dict[str, int]:
    """Return reward -> GPUs of every reward of the group `reward` that is placed managed."""
    return {name: gpus_of(node) for _, name, node in placed(reward, "managed")}


def judge_problems(get: Callable[[str], Any]) -> Iterator[str]:
    """Yield the reasons why rewards placed managed cannot have their GPUs, or what is wrong with a
    reward's entry."""
    try:
        wanted = managed(get("reward"))
    except ValueError as error:
        yield str(error)
        return
    needed, names = sum(wanted.values()), ", ".join(name for name in wanted if wanted[name])
    for name, pool in get("hardware.pools").items():
        key, judges = f"hardware.pools.{name}.judges", pool.get("judges", 0)
        if judges and judges != needed:
            yield (
                f"{key} = {judges}: rewards placed managed take {needed} GPUs of each node "
                f"({names or 'none is'}); set {key}={needed}."
            )
        scores = pool.get("role", "auto") != "trainer" and pool.get("gpu") != "cpu"
        if needed and not judges and scores:
            yield (
                f"{key} = 0: {names} placed managed needs {needed} GPUs of each node that "
                f"generates; set {key}={needed}, or another placement."
            )
