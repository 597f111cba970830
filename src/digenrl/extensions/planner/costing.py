"""Candidates of the planner, and what one needs on a hardware profile: memory, seconds, and the
bound of all runs."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, cast

from digenrl.extensions.planner.bound import solve_bound
from digenrl.extensions.planner.candidate import Candidate
from digenrl.extensions.planner.costs import STAGES, Costs
from digenrl.extensions.planner.floor import floor_seconds
from digenrl.extensions.planner.host_memory import host_gib, lent_bytes
from digenrl.extensions.planner.memory import (
    USABLE,
    Memory,
    offloaded_bytes,
    rollout_memory,
    trainer_memory,
)
from digenrl.extensions.planner.virtual_cluster import Cluster, VirtualRank
from digenrl.extensions.planner.workload import BASE_BYTES, Drawn, Workload
from digenrl.hardware import Hardware, Pool, assign_ranks, shard_group
from digenrl.recompute import ALL, INPUTS, MODES, Recompute
from digenrl.schedule import ScheduleSpec

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _compute_once(method: _Method) -> _Method:
    """Decorate a method of `Costing` so that each answer is computed only once."""

    @functools.wraps(method)
    def known_answer(self: Costing, *args: Any) -> Any:
        key = (method.__name__, *args)
        answer = self._answers.get(key, self)  # an answer is never the costing itself
        if answer is self:
            answer = self._answers[key] = method(self, *args)
        return answer

    return cast(_Method, known_answer)


@dataclass(frozen=True)
class Costing:
    """A workload on a hardware profile: what every candidate needs there in memory and seconds, and
    the bound."""

    work: Workload
    hardware: Hardware
    _answers: dict[Any, Any] = field(init=False, default_factory=dict, compare=False, repr=False)
    """Answers of methods decorated with `_compute_once`, which get equal questions for many
    candidates."""

    def make_candidate(self, trainers: int, rollouts: int, **choices: Any) -> Candidate:
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

    def placed_ranks(self, candidate: Candidate) -> tuple[tuple[str, str], ...]:
        """Return (pool, role) of every rank. Raises ValueError as `assign` does."""
        return self._assign_ranks(candidate.trainers, candidate.rollouts, candidate.first)

    @_compute_once
    def _assign_ranks(
        self, trainers: int, rollouts: int, first: str | None
    ) -> tuple[tuple[str, str], ...]:
        hardware = self.hardware
        if first is not None:
            pools = sorted(hardware.pools, key=lambda pool: pool.name != first)
            hardware = replace(hardware, pools=tuple(replace(pool, role="auto") for pool in pools))
        return assign_ranks(hardware, trainers, rollouts)

    @_compute_once
    def _rank_counts(self, *split: Any) -> dict[tuple[str, str], int]:
        """Return (pool, role) -> number of ranks, in the order of the ranks."""
        return dict(Counter(self._assign_ranks(*split)))

    def rank_counts(self, candidate: Candidate) -> dict[tuple[str, str], int]:
        """Return (pool, role) -> number of ranks, in the order of the ranks."""
        return self._rank_counts(candidate.trainers, candidate.rollouts, candidate.first)

    def trainers_by_pool(self, candidate: Candidate) -> list[tuple[Pool, int]]:
        """Return (pool, number of its trainers), in the order of the ranks."""
        return self._trainers_by_pool(candidate.trainers, candidate.rollouts, candidate.first)

    @_compute_once
    def _trainers_by_pool(self, *split: Any) -> list[tuple[Pool, int]]:
        kinds = self._rank_counts(*split).items()
        return [
            (self.hardware.find_pool(name), n) for (name, role), n in kinds if role == "trainer"
        ]

    def shard_count(self, candidate: Candidate) -> int:
        """Return the number of ranks that share one copy of the weights."""
        if candidate.sharding == "ddp":
            return 1
        if candidate.sharding == "fsdp":
            return candidate.trainers
        if candidate.shard_group is not None:
            return candidate.shard_group
        return shard_group(candidate.trainers, min(pool.per_node for pool in self.hardware.pools))

    def context_sizes(self, candidate: Candidate) -> list[int]:
        """Return the values of `parallel.context` above 1 that the trainers, their nodes and the
        model allow."""
        per_node = (pool.per_node for pool in self.hardware.pools)
        common = math.gcd(candidate.trainers, self.work.tokens, self.work.heads, *per_node)
        return [n for n in range(2, common + 1) if common % n == 0 and not candidate.shares]

    def choose_recompute(self, candidate: Candidate, pool: Pool) -> Recompute:
        """Return what the blocks of a trainer on `pool` keep for the backward pass.

        It is the candidate's choice, or else the fastest choice that fits. If none fits, it is the
        smallest.
        """
        if candidate.recompute is not None:
            return candidate.recompute
        return self._fastest_recompute(pool, *self._memory_arguments(candidate, pool))

    @_compute_once
    def _fastest_recompute(self, pool: Pool, *batches: Any) -> Recompute:
        units = int(self.work.sizes["blocks"])

        def mix_modes(more: str, less: str, part: int) -> Recompute:
            blocks = (more, units - part), (less, part)
            return Recompute(**{mode: n / units for mode, n in blocks if mode != ALL})

        def missing_gib(*mixture: Any) -> float:
            return (
                self._trainer_memory(mix_modes(*mixture), *batches).gib - USABLE * pool.memory_gib
            )

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
        _, size, batch, *_, context = batches
        return min(
            choices,
            key=lambda choice: self._cell_seconds(pool, size, batch, choice, context),
            default=Recompute(inputs=1.0),
        )

    def blocks_at_once(self, candidate: Candidate, pool: Pool) -> int:
        """Return the blocks of a micro-batch on a trainer of `pool`: with unequal shares a fast
        trainer gets several."""
        if not candidate.shares or candidate.sharding == "fsdp":
            return 1
        total = sum(count * own.tflops for own, count in self.trainers_by_pool(candidate))
        return math.ceil(pool.tflops * candidate.trainers / total - 1e-9)

    def _memory_arguments(self, candidate: Candidate, pool: Pool) -> tuple[Any, ...]:
        """Return everything that the memory of a trainer on `pool` depends on, in the order of
        `_trainer_memory`."""
        spec, blocks = candidate.spec, self.blocks_at_once(candidate, pool)
        batch, makes = (spec.task_size, spec.tsp_batch, blocks), candidate.rollouts == 0 or spec.tag
        return (
            self.shard_count(candidate),
            *batch,
            makes,
            spec.tag and candidate.rollouts > 0,
            candidate.encoders,
            spec.context,
        )

    @_compute_once
    def _trainer_memory(
        self,
        recompute: Recompute,
        shards: int,
        task_size: int,
        tsp_batch: int,
        blocks: int,
        generates: bool,
        lends: bool,
        encoders: bool,
        context: int,
    ) -> Memory:
        """Return the bytes of a trainer that trains `blocks` blocks of a micro-batch at once and
        keeps `recompute`."""
        rows = task_size, tsp_batch * blocks
        return trainer_memory(
            self.work, shards, *rows, recompute, generates, lends, encoders, context
        )

    def rank_memory(self, candidate: Candidate) -> dict[tuple[str, str], Memory]:
        """Return (pool, role) -> bytes of a rank."""
        table = {}
        for name, role in self.rank_counts(candidate):
            if role == "trainer":
                pool = self.hardware.find_pool(name)
                kept = self.choose_recompute(candidate, pool)
                table[name, role] = self._trainer_memory(
                    kept, *self._memory_arguments(candidate, pool)
                )
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
        spec, each = candidate.spec, {}
        for pool, _ in self.trainers_by_pool(candidate):
            micro = spec.task_size * spec.tsp_batch * self.blocks_at_once(candidate, pool)
            rows, kept = micro * self.work.trained_passes, self.choose_recompute(candidate, pool)
            waiting = offloaded_bytes(self.work, rows, kept, spec.context)
            each[pool.name] = waiting + self._lent_bytes(candidate)
        return host_gib(self.work, spec, self.hardware, self.placed_ranks(candidate), each)

    def _lent_bytes(self, candidate: Candidate) -> int:
        return lent_bytes(
            self.work, candidate.spec, candidate.rollouts, self.shard_count(candidate)
        )

    def cell_seconds(self, candidate: Candidate) -> float:
        """Return the seconds of one trained step of a task on the slowest trainer, with its wait
        for sharded weights."""
        return max(
            self._paid_seconds(pool, candidate) for pool, _ in self.trainers_by_pool(candidate)
        )

    def least_cell_seconds(self, candidate: Candidate) -> float:
        """Return a lower bound of `cell_seconds` for all choices of recomputation and of steps per
        forward."""
        spec, steps, shards = candidate.spec, self.work.trained_steps, self.shard_count(candidate)
        least = []
        for pool, _ in self.trainers_by_pool(candidate):
            gathering = self.costs.sharding_seconds(self._gathering_pools(pool, candidate), shards)
            plain = self._cell_seconds(pool, spec.task_size, steps, Recompute(), spec.context)
            least.append(plain + self.costs.exposed_seconds(pool, gathering, plain * steps) / steps)
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
            for pool, count in self.trainers_by_pool(candidate)
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
        return [own for own, _ in self.trainers_by_pool(candidate)]

    def exposed_seconds(self, pool: Pool, candidate: Candidate) -> float:
        """Return the seconds of gathering weights that computing one block does not hide, on a
        trainer of `pool`."""
        computing = self.pool_cell_seconds(pool, candidate) * candidate.spec.tsp_batch
        pools, shards = self._gathering_pools(pool, candidate), self.shard_count(candidate)
        return self.costs.exposed_seconds(
            pool, self.costs.sharding_seconds(pools, shards), computing
        )

    @_compute_once
    def _cell_seconds(
        self, pool: Pool, task_size: int, tsp_batch: int, recompute: Recompute, context: int
    ) -> float:
        return self.costs.cell_seconds(pool, task_size, tsp_batch, recompute, context)

    @_compute_once
    def build_cluster(self, candidate: Candidate) -> Cluster:
        """Return the candidate's ranks with their durations, for a virtual run."""
        costs, work, b = self.costs, self.work, candidate.spec.task_size
        kinds, placed = self.rank_counts(candidate), self.placed_ranks(candidate)
        pools = {name: self.hardware.find_pool(name) for name, _ in kinds}
        home, others = placed[0][0], self.other_nodes(placed)
        trainer_pools = [pool for pool, _ in self.trainers_by_pool(candidate)]
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
                step += costs.exposed_seconds(
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
                costs.adopt_seconds(),
            )
            if role == "rollout" and (line := self.hardware.line_between(home, name)) is not None:
                fetch, send = costs.fetch_seconds(line, others[name]), costs.send_seconds(line, b)
                likes[name, role] = replace(
                    likes[name, role], fetch_seconds=fetch, send_seconds=send
                )
        everyone = list(pools.values())
        # Nodes behind a line pay for their versions in fetch_seconds, so publishing is charged for
        # the others only.
        near = sum(
            count
            for name, count in others.items()
            if self.hardware.line_between(home, name) is None
        )
        steps = self._match_slowest(
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
            reduce_seconds=costs.reduce_seconds(
                trainer_pools, candidate.trainers // shards, shards
            ),
            optimizer_seconds=max(costs.optimizer_seconds(pool, shards) for pool in trainer_pools),
            snapshot_seconds=costs.snapshot_seconds(trainer_pools) if candidate.rollouts else 0.0,
            publish_seconds=costs.publish_seconds(everyone, near) if candidate.rollouts else 0.0,
            deliver_seconds=costs.deliver_seconds(everyone, b),
            switch_seconds=costs.switch_seconds(trainer_pools, self._lent_bytes(candidate)),
            useful=work.useful,
            static_claims=candidate.static_claims,
        )

    def other_nodes(self, placed: Sequence[tuple[str, str]]) -> Counter[str]:
        """Return pool -> number of nodes with rollouts, without the node of trainer 0."""
        seats, places = Counter[str](), list[tuple[str, int]]()
        for name, _ in placed:  # a pool's ranks fill its nodes in order
            places.append((name, seats[name] // self.hardware.find_pool(name).per_node))
            seats[name] += 1
        rollouts = {
            node for node, (_, role) in zip(places, placed, strict=True) if role == "rollout"
        }
        return Counter(name for name, _ in rollouts - {places[0]})

    @staticmethod
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

    # ---- the bound

    @_compute_once
    def step_floor(self, candidate: Candidate) -> float:
        """Return a lower bound of the candidate's seconds per RL step."""
        return floor_seconds(self.schedule_spec(candidate), self.build_cluster(candidate))

    def trainers_evaluate(self, drawn: Drawn, candidate: Candidate) -> str | None:
        """Return why trainers evaluate although rollouts could: few rollouts keep many trainers
        waiting. None: rollouts do, or cannot.

        The step's lower bound counts as the time in which trainers do not wait for rollouts.
        """
        if not (self.work.evaluation_auto and self.work.rollouts_evaluate and candidate.rollouts):
            return None
        alone = self.evaluation_seconds(drawn, candidate, rollouts=True)
        together = self.evaluation_seconds(drawn, candidate, rollouts=False)
        if alone - self.step_floor(candidate) <= together:
            return None
        return (
            f"{candidate.rollouts} rollouts would take {alone:.0f} s, and {candidate.trainers} "
            f"trainers take {together:.0f} s"
        )

    def work_units(self) -> dict[str, float]:
        """Return stage -> units of work in one RL step."""
        work = self.work
        return {
            "encode": float(work.prompts),
            "generate": float(work.samples),
            "decode": float(work.samples),
            "score": float(work.samples),
            "train": float(work.cells),
        }

    def seconds_per_unit(self) -> dict[str, dict[str, float | None]]:
        """Return stage -> pool -> seconds per unit at the best batch size, without communication
        and recomputation."""
        costs, group, trained = self.costs, self.work.group_size, self.work.trained_steps
        table: dict[str, dict[str, float | None]] = {stage: {} for stage in self.work_units()}
        for pool in self.hardware.pools:
            table["encode"][pool.name] = costs.encode_seconds(pool)
            table["generate"][pool.name] = self.work.steps * costs.step_seconds(pool, group) / group
            table["decode"][pool.name] = costs.decode_seconds(pool, 1)
            table["score"][pool.name] = costs.score_seconds(pool, 1)
            table["train"][pool.name] = (
                costs.cell_seconds(pool, group, trained, Recompute()) / group
            )
        return table

    def step_bound(self) -> float:
        """Return the shortest RL step, in seconds, that any schedule can reach on this profile."""
        pools = {pool.name: pool.count for pool in self.hardware.pools}
        return solve_bound(pools, self.work_units(), self.seconds_per_unit())

    def bound_of_roles(self, candidate: Candidate) -> float:
        """Return the shortest RL step, in seconds, of all schedules that keep the candidate's roles
        of ranks."""
        seats = {
            f"{pool} {role}": count for (pool, role), count in self.rank_counts(candidate).items()
        }
        table: dict[str, dict[str, float | None]] = {stage: {} for stage in self.work_units()}
        for pool, role in self.rank_counts(candidate):
            makes = role == "rollout" or candidate.rollouts == 0 or candidate.spec.tag
            for stage, seconds in self.seconds_per_unit().items():
                able = role == "trainer" if stage == "train" else makes
                table[stage][f"{pool} {role}"] = seconds[pool] if able else None
        return solve_bound(seats, self.work_units(), table)

    def evaluation_seconds(
        self, drawn: Drawn, candidate: Candidate, rollouts: bool | None = None
    ) -> float:
        """Return the seconds of one evaluation: generating, decoding and scoring what is `drawn`.

        Rollouts take the next prompt as soon as they are free. Trainers get equally many prompts
        each, and wait for the slowest.

        Args:
            rollouts: whether rollouts evaluate; None: where they can.
        """
        if rollouts is None:
            rollouts = self.work.rollouts_evaluate and candidate.rollouts > 0
        costs, room = self.costs, self.work.evaluated or drawn.samples

        def forward_seconds(pool: Pool, samples: int) -> float:
            at_once = max(1, min(samples, room))
            return samples * costs.step_seconds(pool, at_once) / at_once

        def prompt_seconds(pool: Pool) -> float:
            seconds = drawn.steps * forward_seconds(pool, drawn.samples)
            seconds += 2 * self.work.steps * forward_seconds(pool, drawn.compared)
            seconds += drawn.samples * (
                costs.decode_seconds(pool, 1) + costs.score_seconds(pool, 1)
            )
            return seconds + costs.encode_seconds(pool)

        if not rollouts:
            return math.ceil(drawn.prompts / candidate.trainers) * max(
                prompt_seconds(pool) for pool in self.hardware.pools
            )
        names = [name for name, _ in self.placed_ranks(candidate)[candidate.trainers :]]
        seconds = [prompt_seconds(self.hardware.find_pool(name)) for name in names]
        ends = [0.0] * len(names)
        for _ in range(drawn.prompts):
            soonest = min(range(len(names)), key=lambda rank: ends[rank])
            ends[soonest] += seconds[soonest]
        return max(ends)

    def figure_sources(self) -> dict[str, dict[str, str]]:
        """Return stage -> pool -> source of its figures: measured | published | assumed."""
        return {
            stage: {p.name: self.costs.figure_source(stage, p) for p in self.hardware.pools}
            for stage in STAGES
        }
