"""What the engine needs to know about ranks: seconds per unit of work, and what disturbs them."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from digenrl.schedule import ScheduleSpec, place
from digenrl.schedule.timesteps import without

FEW_TASKS = 200
FEW_RANKS = 64
"""So many are simulated one by one without waiting for it."""


@dataclass(frozen=True)
class Rank:
    """One GPU, and what it costs there to do one unit of each kind of work."""

    rank: int
    """Launch rank; trainers come first."""
    role: str
    """trainer | rollout."""
    pool: str
    step_seconds: float
    """One denoising step of one task. inf: this rank cannot generate."""
    encode_seconds: float = 0.0
    """Conditioning of one prompt, paid once per group and rank."""
    decode_seconds: float = 0.0
    """Of one task."""
    score_seconds: float = 0.0
    """Of one task."""
    cell_seconds: float = 0.0
    """Forward and backward of one (task, trained step), inside a block of K steps. Trainers only."""
    exposed_seconds: float = 0.0
    """Communication of one block that computing it does not hide. Trainers only."""
    adopt_seconds: float = 0.0
    """Taking over a published version. Rollout ranks only."""
    fetch_seconds: float = 0.0
    """What a version takes longer to this rank's place than to the trainers'."""
    send_seconds: float = 0.0
    """Of a finished task on the line from this rank's place to the trainers', which takes one task after the other."""

    def at(self, speed: float, number: int) -> Rank:
        """Rank `number`, like this one but so many times as fast."""
        names = ("step_seconds", "encode_seconds", "decode_seconds", "score_seconds", "cell_seconds")
        return replace(self, rank=number, **{name: getattr(self, name) / speed for name in names})

    def task_seconds(self, denoise_steps: int) -> float:
        """One task from noise to reward, conditioning cached."""
        return denoise_steps * self.step_seconds + self.decode_seconds + self.score_seconds


@dataclass(frozen=True)
class Cluster:
    """The ranks and what they do together."""

    ranks: tuple[Rank, ...]
    lockstep: bool = False
    """Trainers share weights or tokens: every micro-batch and lent denoising step is a collective of neighbours."""
    together: int = 0
    """How many neighbours; 0 = all trainers. The first ones decide, and no others begin a micro-batch before them."""
    reduce_seconds: float = 0.0
    """Gradient reduction at the end of an update."""
    optimizer_seconds: float = 0.0
    """Optimizer step of an update."""
    snapshot_seconds: float = 0.0
    """Copy of the published weights, before the trainers go on."""
    publish_seconds: float = 0.0
    """From the copy until rollout ranks have received a version."""
    deliver_seconds: float = 0.0
    """A finished task on its way to the trainers."""
    move_seconds: float = 0.0
    """A suspended task on its way to another rank."""
    switch_seconds: float = 0.0
    """One switch of a trainer between training and generation."""
    useful: float = 1.0
    """Share of a group's samples that is trained."""
    lends_between_updates: bool = False
    """A copy of the published weights is kept, so trainers may lend after the first update of a batch."""
    static_claims: bool = False
    """Tasks are split equally beforehand (what published colocated loops do) instead of claimed."""
    whole: tuple[ScheduleSpec, Cluster] | None = None
    """Of `waves`: the run that they stand for."""

    @cached_property
    def trainers(self) -> tuple[Rank, ...]:
        return tuple(rank for rank in self.ranks if rank.role == "trainer")

    @cached_property
    def rollouts(self) -> tuple[Rank, ...]:
        return tuple(rank for rank in self.ranks if rank.role == "rollout")

    @cached_property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """Trainers that act together: those whose forwards are collectives, else one by one."""
        ids = tuple(rank.rank for rank in self.trainers)
        width = (self.together or len(ids)) if self.lockstep else 1
        return tuple(ids[first : first + width] for first in range(0, len(ids), width))

    def __post_init__(self) -> None:
        if not self.trainers:
            raise ValueError("allocation.trainers = 0: nobody would learn; use at least 1.")
        if [rank.rank for rank in self.ranks] != list(range(len(self.ranks))):
            raise ValueError(f"ranks must be numbered 0 .. {len(self.ranks) - 1} in order.")


def waves(spec: ScheduleSpec, cluster: Cluster, fewest: int) -> tuple[ScheduleSpec, Cluster]:
    """The same run with one rank for every w equal ones and one task for every w of a group, so that what w ranks do
    at once is one event. w divides a portion's tasks, leaves at least `fewest` ranks, and is no larger than brings a
    step to `FEW_TASKS` on `FEW_RANKS`; a rank that stands for more or fewer is as much faster or slower. Exact where w
    divides the numbers of equal ranks.
    """
    divisors = [n for n in range(1, spec.tasks_per_portion + 1) if spec.tasks_per_portion % n == 0]
    allowed = [n for n in divisors if n == 1 or len(cluster.ranks) >= n * fewest]
    events = max(spec.tasks / FEW_TASKS, len(cluster.ranks) / FEW_RANKS)
    width = next((n for n in allowed if n >= events), allowed[-1])
    if width == 1:
        return spec, cluster
    runs = [list(run) for _, run in itertools.groupby(cluster.ranks, key=lambda rank: replace(rank, rank=0))]
    together = spec.context * max(1, round(cluster.together / (width * spec.context))) if cluster.together else 0
    units = [together or spec.context if run[0].role == "trainer" else 1 for run in runs]
    numbers = [unit * max(1, round(len(run) / (width * unit))) for run, unit in zip(runs, units, strict=True)]
    training = sum(number for run, number in zip(runs, numbers, strict=True) if run[0].role == "trainer") * width
    ranks: list[Rank] = []
    shares: list[float] = []
    for run, number in zip(runs, numbers, strict=True):
        trains = run[0].role == "trainer"  # equal parts ask for trainers of one speed
        speed = len(cluster.trainers) / training if trains and not spec.shares else len(run) / (number * width)
        first = replace(run[0], send_seconds=width * run[0].send_seconds)
        ranks += [first.at(speed, len(ranks) + extra) for extra in range(number)]
        shares += [spec.shares[run[0].rank] * speed] * number if trains and spec.shares else []
    smaller = replace(spec, group_size=spec.group_size // width, shares=tuple(shares))
    return smaller, replace(cluster, ranks=tuple(ranks), together=together, whole=(spec, cluster))


def micro_batches(spec: ScheduleSpec, cluster: Cluster, fragment: tuple[int, ...]) -> tuple[tuple[float, ...], ...]:
    """Seconds of each micro-batch of `fragment` on each trainer, from the placement that the runtime uses."""
    alike = replace(spec, tag=False, async_steps=0)  # placed in the same way
    trainers, rows_kept = cluster.trainers, 1.0 if spec.task_size == 1 else cluster.useful  # of each task, some rows
    return tuple(
        tuple(rank.cell_seconds * rows_kept * cells + rank.exposed_seconds * blocks for cells, blocks in own)
        for rank, own in zip(trainers, _loads(alike, len(trainers), cluster.useful, fragment), strict=True)
    )


@functools.lru_cache(maxsize=4096)
def _loads(
    spec: ScheduleSpec, trainers: int, useful: float, fragment: tuple[int, ...]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """(cells, blocks) of each micro-batch of `fragment` on each trainer."""
    placement = place(spec, trainers, fragment)
    if spec.task_size == 1:
        placement = without(placement, _useless(spec, useful, fragment))
    return tuple(tuple((sum(len(block.steps) for block in micro), len(micro)) for micro in own) for own in placement)


def _useless(spec: ScheduleSpec, useful: float, fragment: tuple[int, ...]) -> frozenset[tuple[int, int]]:
    """Tasks (group, part) of one sample that have no gradient: as many of each portion as `useful` leaves, drawn anew
    for each portion but not for each step."""
    count = spec.tasks_per_portion - round(spec.tasks_per_portion * useful)
    return frozenset(
        (group, part)
        for group, portion in zip(spec.groups_of(fragment), fragment, strict=True)
        for part in random.Random(portion).sample(spec.parts_of(portion), count)
    )


@dataclass(frozen=True)
class Disturbance:
    """Jitter, stragglers and failures of a simulated run; neutral by default."""

    jitter: float = 0.0
    """Standard deviation of the logarithm of a duration's factor; each task and each micro-batch has its own."""
    seed: int = 0
    stragglers: Mapping[int, float] = field(default_factory=dict)
    """rank -> factor on all its durations."""
    failures: tuple[tuple[float, int], ...] = ()
    """(virtual second, rollout rank) of deaths."""
    detect_seconds: float = 10.0
    """From a death until its tasks are reissued."""

    def generator(self) -> random.Random:
        """A fresh generator of the run's jitter."""
        return random.Random(self.seed)

    def factor(self, rank: int, generator: random.Random) -> float:
        """What to multiply a duration of `rank` with."""
        noise = math.exp(generator.gauss(0.0, self.jitter)) if self.jitter else 1.0
        return noise * self.stragglers.get(rank, 1.0)
