"""Ranks of a virtual run: seconds per unit of work on each, and the jitter, stragglers and failures
to simulate."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from digenrl.schedule import ScheduleSpec, place_fragment
from digenrl.schedule.timesteps import without_useless_tasks

FEW_TASKS = 200
FEW_RANKS = 64
"""Tasks and ranks up to which `coarsen_run` leaves a run as it is, because simulating each takes no
noticeable time."""


@dataclass(frozen=True)
class VirtualRank:
    """One GPU, and the seconds that one unit of each kind of work takes there."""

    rank: int
    """Launch rank. Trainers come first."""
    role: str
    """trainer | rollout."""
    pool: str
    step_seconds: float
    """Seconds of one denoising step of one task; inf = this rank cannot generate."""
    encode_seconds: float = 0.0
    """Seconds of conditioning one prompt, paid once per group and rank."""
    decode_seconds: float = 0.0
    """Seconds of decoding one task."""
    score_seconds: float = 0.0
    """Seconds of scoring one task."""
    cell_seconds: float = 0.0
    """Seconds of forward and backward of one (task, trained step), inside a block of K steps.
    Trainers only."""
    exposed_seconds: float = 0.0
    """Seconds of one block's communication that its computation does not hide. Trainers only."""
    adopt_seconds: float = 0.0
    """Seconds of loading a received version into the model. Rollout ranks only."""
    fetch_seconds: float = 0.0
    """Extra seconds of sending a version to this rank's place, compared with the trainers' own
    place."""
    send_seconds: float = 0.0
    """Seconds of a finished task on the line from this rank's place to the trainers'. A line sends
    one task at a time."""

    def with_speed(self, speed: float, number: int) -> VirtualRank:
        """Return a copy of this rank with launch rank `number`, `speed` times as fast."""
        names = (
            "step_seconds",
            "encode_seconds",
            "decode_seconds",
            "score_seconds",
            "cell_seconds",
        )
        return replace(self, rank=number, **{name: getattr(self, name) / speed for name in names})

    def task_seconds(self, denoise_steps: int) -> float:
        """Return the seconds of one task from noise to reward, with cached conditioning."""
        return denoise_steps * self.step_seconds + self.decode_seconds + self.score_seconds


@dataclass(frozen=True)
class Cluster:
    """Ranks of a run, and the seconds of what they do together."""

    ranks: tuple[VirtualRank, ...]
    lockstep: bool = False
    """Whether trainers share weights or tokens, so that micro-batches and lent denoising steps are
    collectives."""
    together: int = 0
    """Trainers in one collective (a unit); 0 = all trainers. The first unit decides, and no other
    unit begins a micro-batch before it."""
    reduce_seconds: float = 0.0
    """Seconds of the gradient reduction at the end of an update."""
    optimizer_seconds: float = 0.0
    """Seconds of the optimizer step of an update."""
    snapshot_seconds: float = 0.0
    """Seconds of copying the weights to publish, before trainers go on."""
    publish_seconds: float = 0.0
    """Seconds from the copy until rollout ranks have received a version."""
    deliver_seconds: float = 0.0
    """Seconds that a finished task takes to reach the trainers."""
    switch_seconds: float = 0.0
    """Seconds of one switch of a trainer between training and generation."""
    useful: float = 1.0
    """Share of a group's samples that are trained."""
    static_claims: bool = False
    """Whether tasks are split equally beforehand (as in published colocated loops) instead of
    claimed."""
    whole: tuple[ScheduleSpec, Cluster] | None = None
    """The run that a cluster from `coarsen_run` stands for; None for any other cluster."""

    @cached_property
    def trainers(self) -> tuple[VirtualRank, ...]:
        return tuple(rank for rank in self.ranks if rank.role == "trainer")

    @cached_property
    def rollouts(self) -> tuple[VirtualRank, ...]:
        return tuple(rank for rank in self.ranks if rank.role == "rollout")

    @cached_property
    def training(self) -> Training:
        return tuple([(rank.cell_seconds, rank.exposed_seconds) for rank in self.trainers])

    @cached_property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """Trainers grouped by collective; without collectives each trainer is a unit of its own."""
        ids = tuple(rank.rank for rank in self.trainers)
        width = (self.together or len(ids)) if self.lockstep else 1
        return tuple(ids[first : first + width] for first in range(0, len(ids), width))

    def __post_init__(self) -> None:
        if not self.trainers:
            raise ValueError("allocation.trainers = 0: nobody would learn; use at least 1.")
        if [rank.rank for rank in self.ranks] != list(range(len(self.ranks))):
            raise ValueError(f"ranks must be numbered 0 .. {len(self.ranks) - 1} in order.")


def coarsen_run(spec: ScheduleSpec, cluster: Cluster, fewest: int) -> tuple[ScheduleSpec, Cluster]:
    """Return a smaller run with about the same step time: one rank for every w equal ranks, one
    task for every w tasks.

    Work that w equal ranks do at the same time becomes one event. The number w divides the tasks of
    a portion and leaves at least `fewest` ranks. It is no larger than needed to bring a step down
    to `FEW_TASKS` tasks on `FEW_RANKS` ranks. A rank that stands for more or fewer than w ranks is
    faster or slower in proportion. The result is exact where w divides the numbers of equal ranks.
    """
    divisors = [n for n in range(1, spec.tasks_per_portion + 1) if spec.tasks_per_portion % n == 0]
    allowed = [n for n in divisors if n == 1 or len(cluster.ranks) >= n * fewest]
    events = max(spec.tasks / FEW_TASKS, len(cluster.ranks) / FEW_RANKS)
    width = next((n for n in allowed if n >= events), allowed[-1])
    if width == 1:
        return spec, cluster
    runs = [
        list(run)
        for _, run in itertools.groupby(cluster.ranks, key=lambda rank: replace(rank, rank=0))
    ]
    together = (
        spec.context * max(1, round(cluster.together / (width * spec.context)))
        if cluster.together
        else 0
    )
    units = [together or spec.context if run[0].role == "trainer" else 1 for run in runs]
    numbers = [
        unit * max(1, round(len(run) / (width * unit)))
        for run, unit in zip(runs, units, strict=True)
    ]
    training = (
        sum(number for run, number in zip(runs, numbers, strict=True) if run[0].role == "trainer")
        * width
    )
    ranks: list[VirtualRank] = []
    shares: list[float] = []
    for run, number in zip(runs, numbers, strict=True):
        # Trainers with equal parts all get the same speed factor: else the slowest of them would
        # set the pace.
        trains = run[0].role == "trainer"
        speed = (
            len(cluster.trainers) / training
            if trains and not spec.shares
            else len(run) / (number * width)
        )
        first = replace(
            run[0], send_seconds=width * run[0].send_seconds
        )  # a line sends w tasks one after the other
        ranks += [first.with_speed(speed, len(ranks) + extra) for extra in range(number)]
        shares += [spec.shares[run[0].rank] * speed] * number if trains and spec.shares else []
    smaller = replace(spec, group_size=spec.group_size // width, shares=tuple(shares))
    return smaller, replace(cluster, ranks=tuple(ranks), together=together, whole=(spec, cluster))


def micro_batches(
    spec: ScheduleSpec, cluster: Cluster, fragment: tuple[int, ...]
) -> tuple[tuple[float, ...], ...]:
    """Return the seconds of each micro-batch of `fragment` on each trainer, from the placement that
    the runtime uses."""
    return placed_seconds(placement_spec(spec), cluster.training, cluster.useful, fragment)


def placed_seconds(
    spec: ScheduleSpec, training: Training, useful: float, fragment: tuple[int, ...]
) -> tuple[tuple[float, ...], ...]:
    """Return what `micro_batches` returns, from what it depends on."""
    # A task of one sample is trained or not (see `_useless_tasks`). Of a larger task, some rows are
    # skipped.
    rows_kept = 1.0 if spec.task_size == 1 else useful
    table: dict[Any, tuple[float, ...]] = {}  # equal trainers have few different loads
    loads = _fragment_loads(spec, len(training), useful, fragment)
    keys = [(c * rows_kept, e, own) for (c, e), own in zip(training, loads, strict=True)]
    for cell, exposed, own in set(keys):
        table[cell, exposed, own] = tuple([cell * cells + exposed * n for cells, n in own])
    return tuple([table[key] for key in keys])


Training = tuple[tuple[float, float], ...]
"""(cell_seconds, exposed_seconds) of each trainer."""
Loads = tuple[tuple[tuple[int, int], ...], ...]
"""loads[trainer][micro-batch] = (cells, blocks)."""


@functools.lru_cache(maxsize=4096)
def _fragment_loads(
    spec: ScheduleSpec, trainers: int, useful: float, fragment: tuple[int, ...]
) -> Loads:
    """Return the loads of `fragment`.

    All fragments of a length are shared in the same way, equal trainers each beginning `turn`
    trainers later (`place`), so the first of them is placed for all.
    """
    placement = place_fragment(spec, trainers, tuple(range(len(fragment))))
    if spec.task_size == 1 and useful < 1.0:
        placement = without_useless_tasks.__wrapped__(
            placement, _useless_tasks(spec, useful, fragment)
        )
    loads = tuple(
        tuple([(sum([len(block.steps) for block in micro]), len(micro)) for micro in own])
        for own in placement
    )
    equal = not spec.measured_shares and len(set(spec.shares)) < 2
    turn = fragment[0] // spec.fragment_groups * spec.context % trainers if equal else 0
    return loads[-turn:] + loads[:-turn]


@functools.lru_cache(maxsize=4096)
def placement_spec(spec: ScheduleSpec) -> ScheduleSpec:
    """Return `spec` without what does not change the placement, so that caches serve many
    candidates."""
    return replace(spec, tag=False, async_steps=0, stale_fraction=0.0, skip_zero=True)


def _useless_tasks(
    spec: ScheduleSpec, useful: float, fragment: tuple[int, ...]
) -> frozenset[tuple[int, int]]:
    """Return the one-sample tasks (place in `fragment`, part) without a gradient: the share 1 -
    `useful` of each portion.

    The tasks are drawn at random for each portion, but are the same in every RL step.
    """
    count = spec.tasks_per_portion - round(spec.tasks_per_portion * useful)
    return frozenset(
        (place, part)
        for place, portion in enumerate(fragment)
        for part in random.Random(portion).sample(range(spec.tasks_per_portion), count)
    )


@dataclass(frozen=True)
class Disturbance:
    """Jitter, stragglers and failures of a simulated run; neutral by default."""

    jitter: float = 0.0
    """Standard deviation of the logarithm of a duration's factor; each task and each micro-batch
    has its own."""
    seed: int = 0
    stragglers: Mapping[int, float] = field(default_factory=dict)
    """Rank -> factor on all its durations."""
    failures: tuple[tuple[float, int], ...] = ()
    """(virtual second, rollout rank) of each death."""
    detect_seconds: float = 10.0
    """Seconds from a rank's death until its tasks are reissued."""

    def duration_factors(self) -> Callable[[int], float]:
        """Return a run's rank -> factor on its next duration: jitter times the straggler factor."""
        slow, uniform = self.stragglers.get, random.Random(self.seed).random
        if not self.jitter:
            return lambda rank: slow(rank, 1.0)
        # Box and Muller, as `random.gauss` draws, in a third of its time.
        turns = (uniform() * math.tau for _ in itertools.count())
        pairs = ((turn, math.sqrt(-2.0 * math.log(1.0 - uniform()))) for turn in turns)
        wave = (math.cos, math.sin)
        draws = (math.exp(of(turn) * far * self.jitter) for turn, far in pairs for of in wave)
        return lambda rank: next(draws) * slow(rank, 1.0)
