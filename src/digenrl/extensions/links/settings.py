"""Rules for the keys of the `network` group that this extension reads, and the meaning of their
`auto`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def publication_problems(get: Callable[[str], Any]) -> Iterator[str]:
    """Yield the reasons why a configuration that asks for broadcasts cannot have them."""
    if get("network.publication") != "broadcast":
        return
    rollouts, launch = get("allocation.rollouts"), get("launch")
    wrong = (
        "network.publication = broadcast with {}: {}; set {}, or network.publication=stream.".format
    )
    if isinstance(rollouts, Mapping):
        why = "a broadcast has the members that it began with, and others are to join"
        yield wrong(
            f"allocation.rollouts = {dict(rollouts)}", why, "allocation.rollouts to a number"
        )
    if launch == "ray":
        why = "Ray replaces a rollout that dies, and who joins is no member of a broadcast"
        yield wrong("launch = ray", why, "launch=local")


def line_problems(get: Callable[[str], Any]) -> Iterator[str]:
    """Yield what is wrong with the lines between the pools of a hardware profile."""
    pools, seen = sorted(get("hardware.pools")), dict[frozenset[str], str]()
    for name, entry in get("hardware.links").items():
        pair = frozenset(entry["between"])
        if len(pair) < 2 or not pair <= set(pools):
            yield (
                f"hardware.links.{name}.between = {list(entry['between'])}: does not name two "
                f"pools of the hardware profile; its pools are {', '.join(pools)}."
            )
        elif pair in seen:
            yield (
                f"hardware.links.{name}: joins the pools of hardware.links.{seen[pair]}; leave one "
                "of them."
            )
        seen[pair] = name


def broadcasts(config: Any, rollouts: int) -> bool:
    """Return whether a settled run with `rollouts` rollouts publishes by broadcast.

    `auto` means a broadcast between GPUs in one place, of a fixed number of ranks.
    """
    if config.network.publication != "auto":
        return bool(config.network.publication == "broadcast" and rollouts)
    fixed = (
        rollouts > 0
        and not isinstance(config.allocation.rollouts, Mapping)
        and config.launch != "ray"
    )
    gpus = not config.hardware.emulate and all(
        pool.gpu != "cpu" for pool in config.hardware.pools.values()
    )
    if config.hardware.get("links") or not (
        fixed and gpus and config.trainer.get("accelerator") != "cpu"
    ):
        return False
    from torch.distributed import is_nccl_available

    return is_nccl_available()
