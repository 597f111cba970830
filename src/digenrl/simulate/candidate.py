"""One way to run an experiment on a profile: its memory, its cluster in virtual time, its distance from the bound."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from digenrl.schedule import ScheduleSpec
from digenrl.simulate.bound import bound_seconds
from digenrl.simulate.cluster import Cluster, Rank
from digenrl.simulate.costs import Costs
from digenrl.simulate.engine import Simulated, simulate
from digenrl.simulate.hardware import Hardware, Pool, assign, shard_group
from digenrl.simulate.memory import GIB, Memory, rollout_memory, trainer_memory
from digenrl.simulate.workload import ENCODERS, Workload


@dataclass(frozen=True)
class Candidate:
    """Choices that the planner compares. "Off" is a value."""

    trainers: int
    rollouts: int
    sharding: str = "ddp"
    first: str | None = None
    """Pool that trainers come from first; None = the profile's order and roles."""
    task_size: int = 1
    tsp_batch: int = 1
    checkpointing: bool = True
    gap: int = 1
    tsp_shard: bool = True
    tag: bool = False
    handoff: bool = False
    shares: bool = False
    """In proportion to speed."""
    order: str = "canonical"
    async_steps: int = 0
    stale_fraction: float = 0.5
    static_claims: bool = False

    @property
    def name(self) -> str:
        """The schedule in a word."""
        if self.rollouts == 0:
            return "colocated_naive" if self.static_claims else "colocated"
        if self.async_steps:
            return "full" if self.tag and self.handoff else "async"
        words = [word for word, on in (("gap", self.gap), ("tsp", self.tsp_shard), ("tag", self.tag)) if on]
        return "_".join([*words, *(["handoff"] if self.handoff else [])]) or "sync"


@dataclass(frozen=True)
class Bench:
    """A workload on a profile: what all candidates share."""

    work: Workload
    hardware: Hardware

    @property
    def costs(self) -> Costs:
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
        return shard_group(candidate.trainers, min(pool.per_node for pool in self.hardware.pools))

    def memory(self, candidate: Candidate) -> dict[str, Memory]:
        """Role -> bytes of a rank."""
        generates = candidate.rollouts == 0 or candidate.tag
        keeps = candidate.tag and self.work.lora_rank is not None and self.work.updates > 1
        table = {
            "trainer": trainer_memory(
                self.work,
                self.shards(candidate),
                candidate.task_size,
                candidate.tsp_batch,
                candidate.checkpointing,
                generates,
                keeps,
            )
        }
        if candidate.rollouts:
            table["rollout"] = rollout_memory(self.work, candidate.task_size)
        return table

    def misfits(self, candidate: Candidate) -> list[str]:
        """Why the candidate does not fit into memory, one sentence per pool and role; empty when it does."""
        memory = self.memory(candidate)
        reasons = []
        for pool_name, role in sorted(set(self.placed(candidate))):
            pool, need = self.hardware.pool(pool_name), memory[role].gib
            if need > pool.memory_gib:
                reasons.append(f"{role} on {pool_name} ({pool.gpu}) needs {need:.1f} GiB of {pool.memory_gib:g} GiB")
        return reasons

    def spec(self, candidate: Candidate) -> ScheduleSpec:
        """The schedule that train would build from the candidate's overrides."""
        work = self.work
        shares: tuple[float, ...] = ()
        if candidate.shares:
            speeds = {pool.name: 1.0 / self._cell(pool, candidate) for pool in self.hardware.pools}
            shares = tuple(speeds[pool] for pool, role in self.placed(candidate) if role == "trainer")
        return ScheduleSpec(
            prompts=work.prompts,
            group_size=work.group_size,
            task_size=candidate.task_size,
            denoise_steps=work.steps,
            trained_steps=work.trained_steps,
            updates_per_batch=work.updates,
            gap=candidate.gap,
            order="arrival" if candidate.order == "arrival" else "canonical",
            tsp_batch=candidate.tsp_batch,
            tsp_shard=candidate.tsp_shard,
            tag=candidate.tag,
            handoff=candidate.handoff,
            shares=shares,
            async_steps=candidate.async_steps,
            stale_fraction=candidate.stale_fraction,
        )

    def _cell(self, pool: Pool, candidate: Candidate) -> float:
        return self.costs.cell_seconds(pool, candidate.task_size, candidate.tsp_batch, candidate.checkpointing)

    def cluster(self, candidate: Candidate) -> Cluster:
        """Durations of the candidate, for the engine."""
        costs, work, b = self.costs, self.work, candidate.task_size
        placed = self.placed(candidate)
        memory = self.memory(candidate)
        pools = {name: self.hardware.pool(name) for name, _ in placed}
        trainer_pools = [pools[name] for name, role in placed if role == "trainer"]
        unique = list({pool.name: pool for pool in trainer_pools}.values())
        shards = self.shards(candidate)
        gather = costs.gather_seconds(unique, shards)
        encoders = 2 * ENCODERS[work.model][0] / GIB
        ranks = []
        for number, (name, role) in enumerate(placed):
            pool = pools[name]
            resident = memory[role].gib + encoders <= pool.memory_gib
            step = costs.step_seconds(pool, b)
            if role == "trainer" and shards > 1:
                step = max(max(costs.step_seconds(p, b) for p in unique), gather * work.passes)
            ranks.append(
                Rank(
                    number,
                    role,
                    name,
                    step,
                    costs.encode_seconds(pool, cached=resident),
                    costs.decode_seconds(pool, b),
                    costs.score_seconds(pool, b),
                    self._cell(pool, candidate) if role == "trainer" else 0.0,
                    costs.optimizer_seconds(pool, 1) / 4,
                )
            )
        compute = min(self._cell(pool, candidate) for pool in unique) * candidate.tsp_batch
        exposed = max(0.0, (2 + int(candidate.checkpointing)) * gather * work.passes - compute) if shards > 1 else 0.0
        everyone = list(pools.values())
        volume = 4 * work.trained_parameters / shards
        return Cluster(
            tuple(ranks),
            lockstep=shards > 1,
            micro_batch_seconds=exposed,
            reduce_seconds=costs.reduce_seconds(unique, candidate.trainers),
            optimizer_seconds=max(costs.optimizer_seconds(pool, shards) for pool in unique),
            snapshot_seconds=volume / (self.hardware.efficiency.host_gb_s * 1e9) if candidate.rollouts else 0.0,
            publish_seconds=costs.publish_seconds(everyone, candidate.rollouts),
            deliver_seconds=costs.deliver_seconds(everyone, b),
            move_seconds=costs.move_seconds(everyone, b),
            switch_seconds=costs.switch_seconds(),
            lends_between_updates=work.lora_rank is not None,
            static_claims=candidate.static_claims,
        )

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
            table["train"][pool.name] = costs.cell_seconds(pool, group, trained, False) / group
        return table

    def bound(self) -> float:
        """Seconds of one RL step that no schedule beats on this profile."""
        pools = {pool.name: pool.count for pool in self.hardware.pools}
        return bound_seconds(pools, self.work_units(), self.seconds_per_unit())


@dataclass(frozen=True)
class Outcome:
    """A candidate, simulated."""

    bench: Bench
    candidate: Candidate
    result: Simulated
    bound_s: float

    @property
    def step_s(self) -> float:
        return self.result.step_s

    @property
    def efficiency(self) -> float:
        return self.bound_s / self.step_s

    @property
    def bubble(self) -> dict[str, float]:
        """Cause -> share of all GPU time spent waiting."""
        steps = max(1, len(self.result.step_ends) - 1)
        total = self.step_s * self.bench.hardware.gpus * steps
        table: dict[str, float] = {}
        for (_, stage, cause), seconds in self.result.seconds.items():
            if stage == "wait":
                table[cause] = table.get(cause, 0.0) + seconds / total
        return table

    def limits(self) -> list[dict[str, Any]]:
        """What separates the step from the bound: (cause, seconds per step); the seconds sum to the gap."""
        gpus, steps = self.bench.hardware.gpus, max(1, len(self.result.step_ends) - 1)
        spent: dict[str, float] = {}
        for (_, stage, cause), seconds in self.result.seconds.items():
            spent[f"wait: {cause}" if stage == "wait" else stage] = spent.get(
                f"wait: {cause}" if stage == "wait" else stage, 0.0
            ) + seconds / (gpus * steps)
        limits = {cause: s for cause, s in spent.items() if cause.startswith("wait")}
        limits |= {stage: spent.get(stage, 0.0) for stage in ("optimizer", "publish", "adopt", "send")}
        ranks = self.candidate.trainers + self.candidate.rollouts
        limits["idle GPUs"] = self.step_s * (gpus - ranks) / gpus
        costs, train = self.bench.costs, spent.get("train", 0.0)
        if self.candidate.checkpointing:
            limits["recomputation"] = train * (1.0 - costs.cell_flops(False) / costs.cell_flops(True))
        limits["communication"] = self._communication(train)
        limits = {cause: seconds for cause, seconds in limits.items() if abs(seconds) > 1e-9}
        rest = self.step_s - self.bound_s - sum(limits.values())
        limits["batch size, placement, repeated encoding"] = rest
        ordered = sorted(limits.items(), key=lambda item: -abs(item[1]))
        return [{"cause": cause, "seconds": seconds} for cause, seconds in ordered]

    def _communication(self, train: float) -> float:
        cluster = self.bench.cluster(self.candidate)
        if not cluster.micro_batch_seconds or not train:
            return 0.0
        spec = self.bench.spec(self.candidate)
        block = max(rank.cell_seconds for rank in cluster.trainers) * spec.tsp_batch
        return train * cluster.micro_batch_seconds / (cluster.micro_batch_seconds + block)


def evaluate(bench: Bench, candidate: Candidate, bound_s: float, exact: bool = False, trace: bool = False) -> Outcome:
    """Simulate `candidate`. Quick: one on-policy step. Exact: two, and four of asynchronous ones, which overlap."""
    steps = 2 * candidate.async_steps + (2 if exact else 1)
    cluster = bench.cluster(candidate)
    result = simulate(bench.spec(candidate), cluster, steps, trace=trace, k_max=4 if exact else 2, depth=1)
    return Outcome(bench, candidate, result, bound_s)
