"""Further launchers beside the core's (this machine, torchrun, SLURM)."""

from collections.abc import Callable, Iterator
from typing import Any


def resource_problems(get: Callable[[str], Any]) -> Iterator[str]:
    """Yield a problem for each entry of `ray.resources` that names no pool."""
    pools = sorted(get("hardware.pools"))
    for name in sorted(set(get("ray.resources")) - set(pools)):
        yield (
            f"ray.resources.{name}: is no pool of the hardware profile; its pools are "
            f"{', '.join(pools)}."
        )


RULES = (resource_problems,)
