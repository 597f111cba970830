"""One way to run an experiment on a profile: its memory, its cluster in virtual time, and the bound of all ways."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from digenrl.recompute import ALL, MODES, Recompute
from digenrl.schedule import ScheduleSpec
from digenrl.simulate.bound import Bound, solve_bound
from digenrl.simulate.costs import STAGES, Costs
from digenrl.simulate.hardware import Hardware, Pool, assign, shard_group
from digenrl.simulate.memory import USABLE, Memory, rollout_memory, trainer_memory
from digenrl.simulate.virtual_cluster import Cluster, Rank
from digenrl.simulate.workload import HEADS, Workload


@dataclass(frozen=True)
class Candidate:
    """Choices that the planner compares."""

    trainers: int
    rollouts: int
    spec: ScheduleSpec
    """Its schedule, without shares: `Costing.spec` adds them."""
    sharding: str = "ddp"
    first: str | None = None
    """Pool that trainers come from first; None = the profile's order and roles."""
    recompute: Recompute | None = None
    """What blocks keep for the backward pass; None = on each trainer the least repetition that fits (auto)."""
    encoders: bool = False
    """Text encoders and VAE stay on the GPUs that generate (model.offload_encoders=false)."""
    shares: bool = False
    """Trainers get parts in proportion to their speed."""
    static_claims: bool = False
    """schedule.claims=split."""
    shard_group: int | None = None
    """Trainers of an hsdp group; None = those of a node."""

    def but(self, **changes: Any) -> Candidate:
        """A copy with other values, of its own fields or of its schedule's."""
        own = {name: changes.pop(name) for name in list(changes) if name in _OWN}
        return replace(self, **own, spec=replace(self.spec, **changes) if changes else self.spec)

    @property
    def name(self) -> str:
        """The schedule in a word."""
        spec = self.spec
        if self.rollouts == 0:
            return "colocated_split" if self.static_claims else "colocated"
        if spec.async_steps:
            return "full" if spec.tag and spec.handoff else "async"
        words = [word for word, on in (("gap", spec.gap), ("tsp", spec.tsp_shard), ("tag", spec.tag)) if on]
        return "_".join([*words, *(["handoff"] if spec.handoff else [])]) or "sync"


_OWN = frozenset(Candidate.__dataclass_fields__)


@dataclass(frozen=True)
class Costing:
    """A workload on a profile, and what every candidate would need there: memory, seconds, the bound."""

    work: Workload
    hardware: Hardware
    _chosen: dict[Any, Recompute] = field(default_factory=dict, compare=False, repr=False)
    _speeds: dict[Any, float] = field(default_factory=dict, compare=False, repr=False)
    """Mean TFLOP/s of an allocation's trainers."""

    def candidate(self, trainers: int, rollouts: int, **choices: Any) -> Candidate:
        """A candidate with these choices: fields of `Candidate` or of `ScheduleSpec`; else fragments of a group, tasks
        of a sample and sharded steps."""
        return Candidate(trainers, rollouts, self.work.spec).but(**choices)

    @cached_property
    def costs(self) -> Costs:
        """Seconds of every kind of work."""
        return Costs(self.work, self.hardware)

    def placed(self, candidate: Candidate) -> tuple[tuple[str, str], ...]:
        """(pool, role) of every rank."""
        hardware = self.hardware
        if candidate.first is not None:
            pools = sorted(hardware.pools, key=lambda pool: pool.name != candidate.first)
            hardware = replace(hardware, pools=tuple(replace(pool, role="auto") for pool in pools))
        return assign(hardware, candidate.trainers, candidate.rollouts)

    def shards(self, candidate: Candidate) -> int:
        """Ranks that share one copy of the weights."""
        if candidate.sharding == "ddp":
            return 1
        if candidate.sharding == "fsdp":
            return candidate.trainers
        if candidate.shard_group is not None:
            return candidate.shard_group
        return shard_group(candidate.trainers, min(pool.per_node for pool in self.hardware.pools))

    def contexts(self, candidate: Candidate) -> list[int]:
        """Values of `parallel.context` above 1 that its trainers, their nodes and the model allow."""
        nodes = (pool.per_node for pool in self.hardware.pools)
        common = math.gcd(candidate.trainers, self.work.tokens, HEADS.get(self.work.model, 1), *nodes)
        return [n for n in range(2, common + 1) if common % n == 0 and not candidate.shares]

    def recompute(self, candidate: Candidate, pool: Pool) -> Recompute:
        """What the blocks of a trainer on `pool` keep: the candidate's choice, or the fastest that fits (if none does,
        the smallest)."""
        if candidate.recompute is not None:
            return candidate.recompute
        lends = candidate.rollouts == 0 or candidate.spec.tag
        blocks = self.blocks_at_once(candidate, pool)
        size, batch = candidate.spec.task_size, candidate.spec.tsp_batch
        key = (pool, self.shards(candidate), size, batch, blocks, lends, candidate.encoders, candidate.spec.context)
        if key not in self._chosen:
            self._chosen[key] = self._fastest(candidate, pool)
        return self._chosen[key]

    def _fastest(self, candidate: Candidate, pool: Pool) -> Recompute:
        units = int(self.work.sizes["blocks"])

        def fits(choice: Recompute) -> bool:
            return self.trainer_memory(candidate, choice, pool).gib <= USABLE * pool.memory_gib

        def mixed(more: str, less: str, part: int) -> Recompute:
            shares = {more: (units - part) / units, less: part / units}
            return Recompute(**{mode: share for mode, share in shares.items() if mode != ALL})

        if fits(Recompute()):
            return Recompute()
        choices = []
        for more, less in itertools.combinations(MODES, 2):
            if fits(mixed(more, less, units)):
                low, high = 0, units  # the smallest number of blocks that must keep less
                while low < high:
                    middle = (low + high) // 2
                    low, high = (low, middle) if fits(mixed(more, less, middle)) else (middle + 1, high)
                choices.append(mixed(more, less, low))
        if not choices:
            return Recompute(inputs=1.0)
        spec = candidate.spec
        sizes = spec.task_size, spec.tsp_batch
        return min(choices, key=lambda choice: self.costs.cell_seconds(pool, *sizes, choice, spec.context))

    def blocks_at_once(self, candidate: Candidate, pool: Pool) -> int:
        """Blocks of a micro-batch on a trainer of `pool`: with unequal shares a fast one gets several."""
        if not candidate.shares or candidate.sharding == "fsdp":
            return 1
        key = (candidate.trainers, candidate.rollouts, candidate.first)
        if key not in self._speeds:
            speeds = [self.hardware.pool(name).tflops for name, role in self.placed(candidate) if role == "trainer"]
            self._speeds[key] = sum(speeds) / len(speeds)
        return math.ceil(pool.tflops / self._speeds[key] - 1e-9)

    def trainer_memory(self, candidate: Candidate, recompute: Recompute, pool: Pool) -> Memory:
        """Bytes of a trainer on `pool` whose blocks keep `recompute`."""
        return trainer_memory(
            self.work,
            self.shards(candidate),
            candidate.spec.task_size,
            candidate.spec.tsp_batch * self.blocks_at_once(candidate, pool),
            recompute,
            generates=candidate.rollouts == 0 or candidate.spec.tag,
            keeps_copy=candidate.spec.tag and self.work.lora_rank is not None and self.work.updates > 1,
            encoders=candidate.encoders,
            context=candidate.spec.context,
        )

    def memory(self, candidate: Candidate) -> dict[tuple[str, str], Memory]:
        """(pool, role) -> bytes of a rank."""
        table = {}
        for name, role in dict.fromkeys(self.placed(candidate)):
            if role == "trainer":
                pool = self.hardware.pool(name)
                table[name, role] = self.trainer_memory(candidate, self.recompute(candidate, pool), pool)
            else:
                table[name, role] = rollout_memory(self.work, candidate.spec.task_size, candidate.encoders)
        return table

    def misfits(self, candidate: Candidate) -> list[str]:
        """Why the candidate does not fit into memory, one sentence per pool and role; empty when it does."""
        reasons = []
        for (pool_name, role), memory in sorted(self.memory(candidate).items()):
            pool, need = self.hardware.pool(pool_name), memory.gib
            if need > USABLE * pool.memory_gib:
                reasons.append(
                    f"{role} on {pool_name} ({pool.gpu}) needs {need:.1f} GiB of {USABLE * pool.memory_gib:.1f} GiB "
                    f"({USABLE:.0%} of {pool.memory_gib:g})"
                )
        return reasons

    def trainer_misfits(self, candidate: Candidate) -> list[str]:
        """`misfits` of the trainers alone."""
        return [reason for reason in self.misfits(candidate) if reason.startswith("trainer")]

    def cell_seconds(self, candidate: Candidate) -> float:
        """One trained step of a task on the slowest trainer."""
        pools = {name for name, role in self.placed(candidate) if role == "trainer"}
        return max(self.pool_cell_seconds(self.hardware.pool(name), candidate) for name in pools)

    def spec(self, candidate: Candidate) -> ScheduleSpec:
        """The schedule that train would build from the candidate's overrides."""
        shares: tuple[float, ...] = ()
        if candidate.shares and candidate.sharding != "fsdp":  # there every forward is one of all trainers
            speeds = {pool.name: 1.0 / self.pool_cell_seconds(pool, candidate) for pool in self.hardware.pools}
            shares = tuple(speeds[pool] for pool, role in self.placed(candidate) if role == "trainer")
        return replace(candidate.spec, shares=shares)

    def pool_cell_seconds(self, pool: Pool, candidate: Candidate) -> float:
        """One trained step of a task on a trainer of `pool`."""
        choice, spec = self.recompute(candidate, pool), candidate.spec
        return self.costs.cell_seconds(pool, spec.task_size, spec.tsp_batch, choice, spec.context)

    def cluster(self, candidate: Candidate) -> Cluster:
        """Durations of the candidate, for the engine."""
        costs, work, b = self.costs, self.work, candidate.spec.task_size
        placed = self.placed(candidate)
        pools = {name: self.hardware.pool(name) for name, _ in placed}
        trainer_pools = list({name: pools[name] for name, role in placed if role == "trainer"}.values())
        shards = self.shards(candidate)
        likes, exposed = {}, 0.0
        for name, role in dict.fromkeys(placed):
            pool, cell = pools[name], 0.0
            step = costs.step_seconds(pool, b)
            if role == "trainer":
                cell = self.pool_cell_seconds(pool, candidate)
                group = [pool] if candidate.sharding == "hsdp" else trainer_pools
                if shards > 1:
                    step = max(step, costs.gather_seconds(group, shards))
                    hidden = cell * candidate.spec.tsp_batch
                    exposed = max(exposed, costs.sharding_seconds(group, shards) - hidden)
            likes[name, role] = Rank(
                0,
                role,
                name,
                step,
                costs.encode_seconds(pool, cached=candidate.encoders),
                costs.decode_seconds(pool, b, cached=candidate.encoders),
                costs.score_seconds(pool, b),
                cell,
                costs.adopt_seconds(),
            )
        ranks = [replace(likes[seat], rank=number) for number, seat in enumerate(placed)]
        everyone = list(pools.values())
        return Cluster(
            tuple(self._together(ranks, shards)),
            lockstep=shards > 1 or candidate.spec.context > 1,
            micro_batch_seconds=exposed,
            reduce_seconds=costs.reduce_seconds(trainer_pools, candidate.trainers // shards, shards),
            optimizer_seconds=max(costs.optimizer_seconds(pool, shards) for pool in trainer_pools),
            snapshot_seconds=costs.snapshot_seconds(trainer_pools) if candidate.rollouts else 0.0,
            publish_seconds=costs.publish_seconds(everyone, self.other_nodes(placed)) if candidate.rollouts else 0.0,
            deliver_seconds=costs.deliver_seconds(everyone, b),
            move_seconds=costs.move_seconds(everyone, b),
            switch_seconds=costs.switch_seconds(),
            useful=work.useful,
            lends_between_updates=work.lora_rank is not None,
            static_claims=candidate.static_claims,
        )

    def other_nodes(self, placed: Sequence[tuple[str, str]]) -> int:
        """Nodes with rollouts besides that of trainer 0; a pool's ranks fill its nodes in their order."""
        seats = Counter[str]()
        nodes = []
        for name, _ in placed:
            nodes.append((name, seats[name] // self.hardware.pool(name).per_node))
            seats[name] += 1
        rollouts = {node for node, (_, role) in zip(nodes, placed, strict=True) if role == "rollout"}
        return len(rollouts - {nodes[0]})

    @staticmethod
    def _together(ranks: list[Rank], shards: int) -> list[Rank]:
        """`ranks`, of which those that share weights denoise at the pace of their slowest."""
        trainers = [rank for rank in ranks if rank.role == "trainer"]
        for start in range(0, len(trainers), shards):
            slowest = max(rank.step_seconds for rank in trainers[start : start + shards])
            for rank in trainers[start : start + shards]:
                ranks[rank.rank] = replace(rank, step_seconds=slowest)
        return ranks

    # ---- the bound

    def work_units(self) -> dict[str, float]:
        """Stage -> units of one RL step."""
        work = self.work
        return {
            "encode": float(work.prompts),
            "generate": float(work.samples),
            "decode": float(work.samples),
            "score": float(work.samples),
            "train": float(work.cells),
        }

    def seconds_per_unit(self) -> dict[str, dict[str, float | None]]:
        """Stage -> pool -> seconds per unit at the best batch, communication and recomputation free."""
        costs, group, trained = self.costs, self.work.group_size, self.work.trained_steps
        table: dict[str, dict[str, float | None]] = {stage: {} for stage in self.work_units()}
        for pool in self.hardware.pools:
            table["encode"][pool.name] = costs.encode_seconds(pool)
            table["generate"][pool.name] = self.work.steps * costs.step_seconds(pool, group) / group
            table["decode"][pool.name] = costs.decode_seconds(pool, 1)
            table["score"][pool.name] = costs.score_seconds(pool, 1)
            table["train"][pool.name] = costs.cell_seconds(pool, group, trained, Recompute()) / group
        return table

    def bound(self) -> Bound:
        """What no schedule beats on this profile."""
        pools = {pool.name: pool.count for pool in self.hardware.pools}
        return solve_bound(pools, self.work_units(), self.seconds_per_unit())

    def bound_of_roles(self, candidate: Candidate) -> float:
        """Seconds that no schedule beats in which every rank does only what the candidate has it do."""
        seats: dict[str, int] = {}
        table: dict[str, dict[str, float | None]] = {stage: {} for stage in self.work_units()}
        for pool, role in self.placed(candidate):
            seats[f"{pool} {role}"] = seats.get(f"{pool} {role}", 0) + 1
            makes = role == "rollout" or candidate.rollouts == 0 or candidate.spec.tag
            for stage, seconds in self.seconds_per_unit().items():
                able = role == "trainer" if stage == "train" else makes
                table[stage][f"{pool} {role}"] = seconds[pool] if able else None
        return solve_bound(seats, self.work_units(), table).seconds

    def evaluation_seconds(self, prompts: int, samples: int, trainers: int) -> float:
        """One evaluation: the trainers alone generate, decode and score `samples` of each of `prompts` prompts."""
        costs, pool = self.costs, max(self.hardware.pools, key=lambda pool: self.costs.step_seconds(pool, 1))
        at_once = min(samples, self.work.evaluated or samples)
        sample = self.work.steps * costs.step_seconds(pool, at_once) / at_once
        sample += costs.decode_seconds(pool, 1) + costs.score_seconds(pool, 1)
        return math.ceil(prompts / trainers) * (samples * sample + costs.encode_seconds(pool))

    def sources(self) -> dict[str, dict[str, str]]:
        """Stage -> pool -> where its figures come from: measured | published | assumed."""
        return {stage: {p.name: self.costs.source(stage, p) for p in self.hardware.pools} for stage in STAGES}
