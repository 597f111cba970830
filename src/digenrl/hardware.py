"""A hardware profile as the simulator sees it: pools of equal GPUs, and which rank sits where."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from digenrl.config.settings import HardwareSettings

CONNECTION_GB_S = 1.2
"""GB/s of one TCP connection, from publishing to adopting (benchmarks/publish.py over loopback on
two processor cores)."""
LEAST_SHARE = 0.01
"""Smallest share of a gradient that a line's speed chooses: the smallest one that costs nothing in
benchmarks/results/mixture_compress.md."""


@dataclass(frozen=True)
class Pool:
    """Equal GPUs."""

    name: str
    gpu: str
    count: int
    """GPUs of ranks."""
    role: str
    """trainer | rollout | auto (the planner decides)."""
    memory_gib: float
    tflops: float
    """Peak dense bf16 TFLOP/s of one GPU."""
    hbm_tb_s: float
    intra_gb_s: float
    """GB/s between two GPUs of a node, per direction."""
    inter_gb_s: float
    """GB/s of a node's network link, per direction, shared by its GPUs."""
    per_node: int
    """GPUs of ranks in a node."""
    host_gib: float = math.inf
    """Memory of a node's host in GiB; inf: unknown."""
    judges: int = 0
    """GPUs beside `count`, over all nodes, that hold rewards and no rank."""
    efficiency: tuple[tuple[str, float], ...] = ()
    """Measured efficiencies of the profile, by key. Missing keys use the defaults of the GPU
    model."""


@dataclass(frozen=True)
class Line:
    """Network connection between two pools in different places."""

    gb_s: float
    """GB/s per direction, shared by all GPUs of both pools."""
    latency_s: float = 0.0

    def transfer_seconds(self, size: float) -> float:
        """Return the seconds that a message of `size` bytes takes."""
        return size / (self.gb_s * 1e9) + self.latency_s


@dataclass(frozen=True)
class Hardware:
    """All pools, and durations that `make profile` measured, if there are any."""

    pools: tuple[Pool, ...]
    seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """stage (encode, generate, decode, score: per prompt or sample; train: per cell) -> pool ->
    measured seconds."""
    lines: Mapping[frozenset[str], Line] = field(default_factory=dict)
    """Names of two pools in different places -> the line between them."""

    @property
    def gpus(self) -> int:
        """GPUs of ranks."""
        return sum(pool.count for pool in self.pools)

    @property
    def booked(self) -> int:
        """GPUs of ranks and of rewards."""
        return self.gpus + sum(pool.judges for pool in self.pools)

    def find_pool(self, name: str) -> Pool:
        return next(pool for pool in self.pools if pool.name == name)

    def line_between(self, one: str, other: str) -> Line | None:
        """Return the line between two pools; None: the pools are in one place."""
        return self.lines.get(frozenset((one, other)))

    @property
    def places(self) -> list[list[Pool]]:
        """Return groups of pools that are in one place: there is no line between them."""
        found: list[list[Pool]] = []
        for pool in self.pools:
            apart = [
                any(frozenset((pool.name, other.name)) in self.lines for other in place)
                for place in found
            ]
            if all(apart):
                found.append([pool])
            else:
                found[apart.index(False)].append(pool)
        return found


def parse_hardware(settings: HardwareSettings) -> Hardware:
    """Return the `hardware` group of checked settings as `Hardware`.

    Raises:
        ValueError: the rewards of a pool take all GPUs of a node.
    """
    pools, common = [], {}
    if settings.efficiency is not None:
        common = settings.efficiency.model_dump(exclude_none=True)
    for name, entry in settings.pools.items():
        given: dict[str, Any] = {"count": 1, "role": "auto"} | entry.model_dump(exclude_none=True)
        shares = common | given.pop("efficiency", {})
        given = {"per_node": min(given["count"], 8), "judges": 0} | given
        nodes = math.ceil(given["count"] / given["per_node"])
        if given["judges"] and given["judges"] >= given["per_node"]:
            raise ValueError(
                f"hardware.pools.{name}.judges = {given['judges']}: a node has "
                f"{given['per_node']} GPUs; leave one for a rank."
            )
        given["per_node"] -= given["judges"]
        given["judges"] *= nodes
        given["count"] -= given["judges"]
        pools.append(Pool(str(name), efficiency=tuple(shares.items()), **given))
    lines = {
        frozenset(entry.between): Line(entry.gb_s, entry.latency_s or 0.0)
        for entry in (settings.links or {}).values()
    }
    return Hardware(tuple(pools), settings.seconds or {}, lines)


def trainer_speeds(profile: Hardware, trainers: int, rollouts: int) -> tuple[float, ...]:
    """Return the speed of each trainer rank on its pool, in any unit: by the profile's measured
    seconds per cell where it has them, else by the peak."""
    pools = [
        profile.find_pool(name) for name, _ in assign_ranks(profile, trainers, rollouts)[:trainers]
    ]
    measured = profile.seconds.get("train", {})
    if all(pool.name in measured for pool in pools):
        return tuple(1.0 / measured[pool.name] for pool in pools)
    return tuple(pool.tflops for pool in pools)


def shard_group(trainers: int, per_node: int) -> int:
    """Return how many trainers hold one copy of the weights together under hsdp.

    If all trainers fit into one node, the group is all trainers. Otherwise it is the largest number
    that divides both the trainers and the GPUs of a node, so that no group spans two nodes.
    """
    return trainers if trainers <= per_node else math.gcd(trainers, per_node)


def assign_ranks(hardware: Hardware, trainers: int, rollouts: int) -> tuple[tuple[str, str], ...]:
    """Return (pool, role) of every rank, trainers first.

    Trainers come from pools of role trainer, then from auto pools in their order. All of them are
    in the first place that has room for them; where none has, they are in several places
    (`trainers_line`). Rollouts come from pools of role rollout, then from auto pools in reverse
    order, in any place. The order of the pools and two numbers therefore describe every placement.

    Raises:
        ValueError: a role has fewer GPUs than asked for.
    """
    left = {pool.name: pool.count for pool in hardware.pools}
    ranks: list[tuple[str, str]] = []
    for role, number, order in (
        ("trainer", trainers, list(hardware.pools)),
        ("rollout", rollouts, list(reversed(hardware.pools))),
    ):
        own = [p for p in hardware.pools if p.role == role] + [p for p in order if p.role == "auto"]
        if rollouts == 0:
            own = list(hardware.pools)
        if role == "trainer":
            own = _trainer_pools(hardware, own, number)
        missing = number
        for pool in own:
            taken = min(missing, left[pool.name])
            left[pool.name] -= taken
            missing -= taken
            ranks += [(pool.name, role)] * taken
        if missing:
            pools = ", ".join(f"{pool.name}: {pool.count} {pool.role}" for pool in hardware.pools)
            raise ValueError(
                f"allocation.{role}s = {number}: the hardware profile has {number - missing} GPUs "
                f"left for that role ({pools}); lower it or change a pool's role."
            )
    return tuple(ranks)


def _trainer_pools(hardware: Hardware, pools: Sequence[Pool], trainers: int) -> list[Pool]:
    """Return the pools, in order, of the first place that has room for all trainers; all pools
    where no place has."""
    found = ([pool for pool in pools if pool in place] for place in hardware.places)
    places = sorted(filter(None, found), key=lambda place: pools.index(place[0]))
    rooms = [sum(pool.count for pool in place) for place in places]
    return next(
        (place for place, room in zip(places, rooms, strict=True) if room >= trainers), list(pools)
    )


def trainers_line(hardware: Hardware, ranks: Sequence[tuple[str, str]]) -> Line | None:
    """Return the slowest line between pools with trainers; None: all are in one place.

    Args:
        ranks: (pool, role) of every rank, as `assign_ranks` returns them.
    """
    pools = dict.fromkeys(name for name, role in ranks if role == "trainer")
    between = (hardware.line_between(*pair) for pair in itertools.combinations(pools, 2))
    return min(filter(None, between), key=lambda line: line.gb_s, default=None)


def gradient_share(
    asked: float | str, hardware: Hardware, ranks: Sequence[tuple[str, str]]
) -> float | None:
    """Return the share of a gradient's values that travel in an update (`parallel.compress`); None:
    all, uncompressed.

    `auto` follows the slowest line between trainers: the all-gather of the chosen values takes as
    long there as the all-reduce of all values would take in the slowest network of one place. A
    chosen value has a number and a place, 8 bytes that reach each of n trainers. An all-reduce
    moves 4 bytes twice. So share x 8 (n - 1) / line = 8 (n - 1) / n / network. This is AdaTopK's
    idea of ratios in proportion to links' times (FusionLLM, arXiv 2410.12707), for a sum that
    crosses every link. At most half of an all-reduce's bytes travel.

    Example:
        >>> pools = [Pool(name, "", 4, "trainer", 80, 1, 1, 100, 1.25, 4) for name in ("a", "b")]
        >>> wan = {frozenset(("a", "b")): Line(gb_s=0.125)}
        >>> gradient_share("auto", Hardware(tuple(pools), lines=wan), [("a", "trainer")] * 4)
        >>> ranks = [("a", "trainer"), ("b", "trainer")]
        >>> gradient_share("auto", Hardware(tuple(pools), lines=wan), ranks)
        0.05
    """
    if not isinstance(asked, str):
        return asked
    line = trainers_line(hardware, ranks)
    if asked == "off" or line is None:
        return None
    trainers = [hardware.find_pool(name) for name, role in ranks if role == "trainer"]
    speed = line.gb_s / min(pool.inter_gb_s for pool in trainers)
    share = min(0.5, max(speed, LEAST_SHARE * len(trainers))) / len(trainers)
    return float(f"{share:.2g}")  # as the settled configuration shows it
