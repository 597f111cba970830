"""Other ways to start the ranks of a run than on this machine, by torchrun or by SLURM."""

from collections.abc import Callable, Iterator
from typing import Any


def resource_problems(get: Callable[[str], Any]) -> Iterator[str]:
    """Yield the entries of `ray.resources` that are for no pool."""
    pools = sorted(get("hardware.pools"))
    for name in sorted(set(get("ray.resources")) - set(pools)):
        yield f"ray.resources.{name}: is no pool of the hardware profile; its pools are {', '.join(pools)}."


RULES = (resource_problems,)
