"""What a candidate of the planner needs on a hardware profile: memory and seconds."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, TypeVarTuple, Unpack

from digenrl.config.relations import saves_bytes
from digenrl.extensions.planner.candidate import Candidate, Choices
from digenrl.extensions.planner.costs import Costs
from digenrl.extensions.planner.floor import floor_seconds
from digenrl.extensions.planner.host_memory import host_gib, lent_bytes
from digenrl.extensions.planner.links import (
    adopt_seconds,
    deliver_seconds,
    exposed_seconds,
    fetch_seconds,
    publish_seconds,
    reduce_seconds,
    send_seconds,
    snapshot_seconds,
    switch_seconds,
)
from digenrl.extensions.planner.memory import (
    USABLE,
    Memory,
    TrainerLoad,
    offloaded_bytes,
    rollout_memory,
    trainer_memory,
)
from digenrl.extensions.planner.placement import Placement, place_split
from digenrl.extensions.planner.virtual_cluster import Cluster, VirtualRank
from digenrl.extensions.planner.workload import BASE_BYTES, Workload
from digenrl.hardware import Hardware, Pool, gradient_share, shard_group, trainers_line
from digenrl.recompute import ALL, INPUTS, MODES, Recompute
from digenrl.schedule import ScheduleSpec

MOST_VALUES = 2**31 - 1
"""Most values of a gradient that is compressed (`strategy/exchange.py`): a place takes 4 bytes."""

_Questions = TypeVarTuple("_Questions")
_Answer = TypeVar("_Answer")


def _compute_once(
    method: Callable[[Costing, Unpack[_Questions]], _Answer],
) -> Callable[[Costing, Unpack[_Questions]], _Answer]:
    """Decorate a method of `Costing` so that each answer is computed only once."""

    @functools.wraps(method)
    def known_answer(self: Costing, *args: *_Questions) -> _Answer:
        key = (method.__name__, *args)
        answer = self._answers.get(key, self)  # an answer is never the costing itself
        if answer is self:
            answer = self._answers[key] = method(self, *args)
        found: _Answer = answer
        return found

    return known_answer


@dataclass(frozen=True)
class Costing:
    """A workload on a hardware profile: what every candidate needs there in memory and seconds."""

    work: Workload
    hardware: Hardware
    _answers: dict[tuple[object, ...], Any] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )
    """Answers of methods decorated with `_compute_once`, which get equal questions for many
    candidates."""

    def make_candidate(
        self, trainers: int, rollouts: int, /, **choices: Unpack[Choices]
    ) -> Candidate:
        """Return a candidate with these `choices`, which are fields of `Candidate` or of
        `ScheduleSpec`.

        By default fragments are one group, tasks are one sample, and trained steps are sharded.
        """
        return Candidate(trainers, rollouts, self.work.spec).with_changes(**choices)

    @property
    def quantized(self) -> Costing:
        """Costing of the same work with its frozen base in 4 bits (model.quantize=nf4)."""
        return replace(self, work=replace(self.work, base_bytes=BASE_BYTES["nf4"]))

    @cached_property
    def costs(self) -> Costs:
        """Cost model of the workload on the hardware profile."""
        return Costs(self.work, self.hardware)

    def place_ranks(self, candidate: Candidate) -> Placement:
        """Return where the candidate's ranks are. Raises ValueError as `assign_ranks` does."""
        return self._place_split(candidate.trainers, candidate.rollouts, candidate.first)

    @_compute_once
    def _place_split(self, trainers: int, rollouts: int, first: str | None) -> Placement:
        return place_split(self.hardware, trainers, rollouts, first)

    def shard_count(self, candidate: Candidate) -> int:
        """Return the number of ranks that share one copy of the weights."""
        if candidate.sharding == "ddp":
            return 1
        if candidate.sharding == "fsdp":
            return candidate.trainers
        if candidate.shard_group is not None:
            return candidate.shard_group
        return shard_group(candidate.trainers, min(pool.per_node for pool in self.hardware.pools))

    def choose_recompute(self, candidate: Candidate, pool: Pool) -> Recompute:
        """Return what the blocks of a trainer on `pool` keep for the backward pass.

        It is the candidate's choice, or else the fastest choice that fits. If none fits, it is the
        smallest.
        """
        if candidate.recompute is not None:
            return candidate.recompute
        return self._fastest_recompute(pool, self._trainer_load(candidate, pool))

    @_compute_once
    def _fastest_recompute(self, pool: Pool, load: TrainerLoad) -> Recompute:
        units = self.work.sizes["blocks"]

        def mix_modes(more: str, less: str, part: int) -> Recompute:
            blocks = (more, units - part), (less, part)
            return Recompute(**{mode: n / units for mode, n in blocks if mode != ALL})

        def missing_gib(more: str, less: str, part: int) -> float:
            need = self._trainer_memory(load, mix_modes(more, less, part)).gib
            return need - USABLE * pool.memory_gib

        if missing_gib(ALL, INPUTS, 0) <= 0.0:
            return Recompute()
        # In a mixture of two modes, some blocks keep more and the others less. Memory falls about
        # in proportion to the blocks that keep less, so a secant finds the fewest of them.
        # Compiled blocks show no operators, of which the other modes keep some.
        choices, modes = [], (ALL, INPUTS) if self.work.engine == "compiled" else MODES
        for more, less in itertools.combinations(modes, 2):
            low, high = 0, units
            above, below = missing_gib(more, less, low), missing_gib(more, less, high)
            if above <= 0.0 or below > 0.0:  # where all keep `more`, that mixes with ALL too
                continue
            while high - low > 1:
                middle = min(
                    max(low + 1, low + int((high - low) * above / (above - below))), high - 1
                )
                there = missing_gib(more, less, middle)
                low, above = (middle, there) if there > 0.0 else (low, above)
                high, below = (high, below) if there > 0.0 else (middle, there)
            choices.append(mix_modes(more, less, high))
        return min(
            choices,
            key=lambda choice: self._cell_seconds(
                pool, load.task_size, load.tsp_batch, choice, load.context
            ),
            default=Recompute(inputs=1.0),
        )

    def _trainer_load(self, candidate: Candidate, pool: Pool) -> TrainerLoad:
        spec = candidate.spec
        return TrainerLoad(
            self.shard_count(candidate),
            spec.task_size,
            spec.tsp_batch,
            generates=candidate.rollouts == 0 or spec.tag,
            lends=spec.tag and candidate.rollouts > 0,
            encoders=candidate.encoders,
            context=spec.context,
            blocks=_blocks_at_once(candidate, pool, self.place_ranks(candidate)),
            compresses=travelling_share(self, candidate) is not None,
        )

    @_compute_once
    def _trainer_memory(self, load: TrainerLoad, recompute: Recompute) -> Memory:
        return trainer_memory(self.work, load, recompute)

    def rank_memory(self, candidate: Candidate) -> dict[tuple[str, str], Memory]:
        """Return (pool, role) -> bytes of a rank."""
        table = {}
        for name, role in self.place_ranks(candidate).counts:
            if role == "trainer":
                pool = self.hardware.find_pool(name)
                kept = self.choose_recompute(candidate, pool)
                table[name, role] = self._trainer_memory(self._trainer_load(candidate, pool), kept)
            else:
                table[name, role] = self._rollout_memory(
                    candidate.spec.task_size, candidate.encoders
                )
        return table

    @_compute_once
    def _rollout_memory(self, task_size: int, encoders: bool) -> Memory:
        return rollout_memory(self.work, task_size, encoders)

    @_compute_once
    def find_misfits(self, candidate: Candidate) -> list[str]:
        """Return why the candidate does not fit into memory, one sentence per pool and role; empty
        when it fits."""
        reasons = []
        if self.work.base_bytes < BASE_BYTES[None] and candidate.sharding != "ddp":
            reasons.append("quantized weights are not divided among trainers")
        for (pool_name, role), memory in sorted(self.rank_memory(candidate).items()):
            pool, need = self.hardware.find_pool(pool_name), memory.gib
            if need > USABLE * pool.memory_gib:
                reasons.append(
                    f"{role} on {pool_name} ({pool.gpu}) needs {need:.1f} GiB of "
                    f"{USABLE * pool.memory_gib:.1f} GiB ({USABLE:.0%} of {pool.memory_gib:g})"
                )
        for pool_name, need in self.host_gib(candidate).items():
            room = self.hardware.find_pool(pool_name).host_gib
            if need > USABLE * room:
                reasons.append(
                    f"ranks of a node of {pool_name} keep what needs {need:.1f} GiB of "
                    f"{USABLE * room:.1f} GiB ({USABLE:.0%} of {room:g}) on its host"
                )
        return reasons

    @_compute_once
    def host_gib(self, candidate: Candidate) -> dict[str, float]:
        """Return pool -> GiB that the ranks of its fullest node keep in host memory."""
        spec, placement, each = candidate.spec, self.place_ranks(candidate), {}
        for pool, _ in placement.trainers_by_pool:
            rows = self._trainer_load(candidate, pool).cells * self.work.trained_passes
            kept = self.choose_recompute(candidate, pool)
            waiting = offloaded_bytes(self.work, rows, kept, spec.context)
            each[pool.name] = waiting + self._lent_bytes(candidate)
        return host_gib(self.work, spec, self.hardware, placement.ranks, each)

    def _lent_bytes(self, candidate: Candidate) -> int:
        return lent_bytes(
            self.work, candidate.spec, candidate.rollouts, self.shard_count(candidate)
        )

    def cell_seconds(self, candidate: Candidate) -> float:
        """Return the seconds of one trained step of a task on the slowest trainer, with its wait
        for sharded weights."""
        return max(
            self._paid_seconds(pool, candidate)
            for pool, _ in self.place_ranks(candidate).trainers_by_pool
        )

    def least_cell_seconds(self, candidate: Candidate) -> float:
        """Return a lower bound of `cell_seconds` for all choices of recomputation and of steps per
        forward."""
        spec, steps, shards = candidate.spec, self.work.trained_steps, self.shard_count(candidate)
        least = []
        for pool, _ in self.place_ranks(candidate).trainers_by_pool:
            gathering = self.costs.sharding_seconds(self._gathering_pools(pool, candidate), shards)
            plain = self._cell_seconds(pool, spec.task_size, steps, Recompute(), spec.context)
            least.append(plain + exposed_seconds(pool, gathering, plain * steps) / steps)
        return max(least)

    def _paid_seconds(self, pool: Pool, candidate: Candidate) -> float:
        """Return `pool_cell_seconds` plus a cell's part of `exposed_seconds`."""
        return (
            self.pool_cell_seconds(pool, candidate)
            + self.exposed_seconds(pool, candidate) / candidate.spec.tsp_batch
        )

    def schedule_spec(self, candidate: Candidate) -> ScheduleSpec:
        """Return the schedule that `train` would build from the candidate's overrides, with
        shares."""
        # With fsdp all trainers run every forward together, so unequal shares would only make the
        # fast ones wait.
        if not candidate.shares or candidate.sharding == "fsdp":
            return candidate.spec
        shares = tuple(
            share
            for pool, count in self.place_ranks(candidate).trainers_by_pool
            for share in [1.0 / self._paid_seconds(pool, candidate)] * count
        )
        return replace(candidate.spec, shares=shares)

    def pool_cell_seconds(self, pool: Pool, candidate: Candidate) -> float:
        """Return the seconds of one trained step of a task on a trainer of `pool`."""
        choice, spec = self.choose_recompute(candidate, pool), candidate.spec
        return self._cell_seconds(pool, spec.task_size, spec.tsp_batch, choice, spec.context)

    def _gathering_pools(self, pool: Pool, candidate: Candidate) -> list[Pool]:
        """Return the pools whose trainers share weights with one of `pool`. An hsdp group stays
        within a node."""
        if candidate.sharding == "hsdp":
            return [pool]
        return [own for own, _ in self.place_ranks(candidate).trainers_by_pool]

    def exposed_seconds(self, pool: Pool, candidate: Candidate) -> float:
        """Return the seconds of gathering weights that computing one block does not hide, on a
        trainer of `pool`."""
        computing = self.pool_cell_seconds(pool, candidate) * candidate.spec.tsp_batch
        pools, shards = self._gathering_pools(pool, candidate), self.shard_count(candidate)
        return exposed_seconds(pool, self.costs.sharding_seconds(pools, shards), computing)

    @_compute_once
    def _cell_seconds(
        self, pool: Pool, task_size: int, tsp_batch: int, recompute: Recompute, context: int
    ) -> float:
        return self.costs.cell_seconds(pool, task_size, tsp_batch, recompute, context)

    @_compute_once
    def build_cluster(self, candidate: Candidate) -> Cluster:
        """Return the candidate's ranks with their durations, for a virtual run."""
        costs, work, b = self.costs, self.work, candidate.spec.task_size
        placement = self.place_ranks(candidate)
        kinds, placed = placement.counts, placement.ranks
        pools = {name: self.hardware.find_pool(name) for name, _ in kinds}
        home, others = placed[0][0], placement.other_nodes
        trainer_pools = [pool for pool, _ in placement.trainers_by_pool]
        shards = self.shard_count(candidate)
        together = math.lcm(shards, candidate.spec.context)
        likes = {}
        for name, role in kinds:
            pool, cell, exposed = pools[name], 0.0, 0.0
            step = costs.step_seconds(pool, b)
            if role == "trainer":
                cell, exposed = (
                    self.pool_cell_seconds(pool, candidate),
                    self.exposed_seconds(pool, candidate),
                )
                # A trainer that generates gathers sharded weights in every denoising step.
                step += exposed_seconds(
                    pool, costs.gather_seconds(self._gathering_pools(pool, candidate), shards), step
                )
            likes[name, role] = VirtualRank(
                0,
                role,
                name,
                step,
                costs.encode_seconds(pool, cached=candidate.encoders),
                costs.decode_seconds(pool, b, cached=candidate.encoders),
                costs.score_seconds(pool, b),
                cell,
                exposed,
                adopt_seconds(work),
            )
            if role == "rollout" and (line := self.hardware.line_between(home, name)) is not None:
                fetch = fetch_seconds(work, line, others[name])
                likes[name, role] = replace(likes[name, role], fetch_seconds=fetch)
            lines = (self.hardware.line_between(own.name, name) for own in trainer_pools)
            if role == "rollout" and (slow := [line for line in lines if line is not None]):
                send = max(send_seconds(work, line, b) for line in slow)
                likes[name, role] = replace(likes[name, role], send_seconds=send)
        everyone = list(pools.values())
        # Nodes behind a line pay for their versions in fetch_seconds, so publishing is charged for
        # the others only.
        near = sum(
            count
            for name, count in others.items()
            if self.hardware.line_between(home, name) is None
        )
        steps = _match_slowest(
            [likes[place].step_seconds for place in placed], candidate.trainers, shards
        )
        ranks = tuple(
            VirtualRank(**{**vars(likes[place]), "rank": number, "step_seconds": step})
            for number, (place, step) in enumerate(zip(placed, steps, strict=True))
        )
        return Cluster(
            ranks,
            lockstep=together > 1,
            together=0 if together >= candidate.trainers else together,
            reduce_seconds=reduce_seconds(
                work,
                trainer_pools,
                candidate.trainers // shards,
                shards,
                travelling_share(self, candidate),
                trainers_line(self.hardware, placed),
            ),
            optimizer_seconds=max(costs.optimizer_seconds(pool, shards) for pool in trainer_pools),
            snapshot_seconds=snapshot_seconds(work, trainer_pools) if candidate.rollouts else 0.0,
            publish_seconds=publish_seconds(work, everyone, near) if candidate.rollouts else 0.0,
            deliver_seconds=deliver_seconds(work, everyone, b),
            switch_seconds=switch_seconds(trainer_pools, self._lent_bytes(candidate)),
            useful=work.useful,
            static_claims=candidate.static_claims,
        )

    @_compute_once
    def step_floor(self, candidate: Candidate) -> float:
        """Return a lower bound of the candidate's seconds per RL step."""
        return floor_seconds(self.schedule_spec(candidate), self.build_cluster(candidate))


def gradient_refusal(costing: Costing, candidate: Candidate) -> str | None:
    """Return why a run refuses how the candidate's trainers exchange gradients; None: it does not.

    Raises:
        ValueError: the roles of the pools do not allow the split.
    """
    asked, trainers = costing.work.gradient_share, candidate.trainers
    ranks, told = costing.place_ranks(candidate).ranks, f"parallel.compress = {asked}"
    if asked == "off":
        if trainers_line(costing.hardware, ranks) is None:
            return None
        return f"{told}: whole gradients would cross a line between {trainers} trainers"
    if trainers == 1:
        return f"{told}: a single trainer has nobody to exchange gradients with"
    # `auto` becomes no share that saves nothing.
    if asked != "auto" and not saves_bytes(asked, trainers):
        return f"{told}: as many bytes would travel between {trainers} trainers as without"
    if travelling_share(costing, candidate) is None:
        return None
    if candidate.sharding != "ddp":
        return f"{told}: only replicas exchange whole gradients, and not {candidate.sharding}"
    if (values := costing.work.trained_parameters) > MOST_VALUES:
        return f"{told}: {values} values are trained, at most {MOST_VALUES} can be"
    return None


def travelling_share(costing: Costing, candidate: Candidate) -> float | None:
    """Return the share of a gradient's values that travel in an update; None: all, such as where
    `auto` finds no line between trainers."""
    ranks = costing.place_ranks(candidate).ranks
    return gradient_share(costing.work.gradient_share, costing.hardware, ranks)


def only_replicas(costing: Costing, candidate: Candidate) -> bool:
    """Return whether nothing but replicas (ddp) is possible: a single trainer has nobody to share
    weights with, and shards do not exchange the largest values of gradients."""
    return candidate.trainers == 1 or travelling_share(costing, candidate) is not None


def _blocks_at_once(candidate: Candidate, pool: Pool, placement: Placement) -> int:
    """Return the blocks of a micro-batch on a trainer of `pool`: with unequal shares a fast trainer
    gets several."""
    if not candidate.shares or candidate.sharding == "fsdp":
        return 1
    total = sum(count * own.tflops for own, count in placement.trainers_by_pool)
    return math.ceil(pool.tflops * candidate.trainers / total - 1e-9)


def _match_slowest(steps: list[float], trainers: int, shards: int) -> list[float]:
    """Return `steps`, the seconds per denoising step of every rank, with trainers that share
    weights made equal.

    Each of them takes as long as the slowest of its group. No group is faster than the first,
    which begins every step.
    """
    for start in range(0, trainers if shards > 1 else 0, shards):
        end = min(start + shards, trainers)
        steps[start:end] = [max(steps[0], *steps[start:end])] * (end - start)
    return steps
