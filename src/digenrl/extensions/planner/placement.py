"""Places of a run's ranks on a hardware profile."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from digenrl.hardware import Hardware, Pool, assign_ranks


@dataclass(frozen=True)
class Placement:
    """Places of a run's ranks."""

    hardware: Hardware
    ranks: tuple[tuple[str, str], ...]
    """(pool, role) of every rank, trainers first. A pool's ranks fill its nodes in order."""

    @cached_property
    def counts(self) -> dict[tuple[str, str], int]:
        """(pool, role) -> number of ranks, in the order of the ranks."""
        return dict(Counter(self.ranks))

    @cached_property
    def trainers_by_pool(self) -> list[tuple[Pool, int]]:
        """(pool, number of its trainers), in the order of the ranks."""
        kinds = self.counts.items()
        return [
            (self.hardware.find_pool(name), n) for (name, role), n in kinds if role == "trainer"
        ]

    @cached_property
    def other_nodes(self) -> Counter[str]:
        """Pool -> number of nodes with rollouts, without the node of trainer 0."""
        seats, places = Counter[str](), list[tuple[str, int]]()
        for name, _ in self.ranks:
            places.append((name, seats[name] // self.hardware.find_pool(name).per_node))
            seats[name] += 1
        nodes = zip(places, self.ranks, strict=True)
        rollouts = {node for node, (_, role) in nodes if role == "rollout"}
        return Counter(name for name, _ in rollouts - {places[0]})


def place_split(hardware: Hardware, trainers: int, rollouts: int, first: str | None) -> Placement:
    """Return where `trainers` and `rollouts` are.

    Args:
        first: pool that trainers are taken from first; None: the profile's order and roles.

    Raises:
        ValueError: as `assign_ranks`.
    """
    ordered = hardware
    if first is not None:
        pools = sorted(hardware.pools, key=lambda pool: pool.name != first)
        ordered = replace(hardware, pools=tuple(replace(pool, role="auto") for pool in pools))
    return Placement(hardware, assign_ranks(ordered, trainers, rollouts))
