"""Launchers beside the core's (this machine): torchrun, SLURM, Ray; and ranks that join a run."""

from collections.abc import Callable, Iterator
from typing import Any

from digenrl.cli.commands import Command


def resource_problems(get: Callable[[str], Any]) -> Iterator[str]:
    """Yield a problem for each entry of `ray.resources` that names no pool."""
    pools = sorted(get("hardware.pools"))
    for name in sorted(set(get("ray.resources")) - set(pools)):
        yield (
            f"ray.resources.{name}: is no pool of the hardware profile; its pools are "
            f"{', '.join(pools)}."
        )


COMMANDS = {
    "join": Command(
        "digenrl.extensions.launchers.cli.join",
        "add one rollout to a running run, from any machine: join RUN",
        "run",
    ),
}
RULES = (resource_problems,)
