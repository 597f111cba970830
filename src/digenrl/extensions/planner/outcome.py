"""Outcome of a simulated candidate: the seconds of its RL step, and what separates them from the
bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypedDict

from digenrl.extensions.planner.bound import bound_of_roles, seconds_per_unit
from digenrl.extensions.planner.candidate import Candidate
from digenrl.extensions.planner.costing import Costing
from digenrl.extensions.planner.evaluation import evaluation_seconds, trainers_evaluate
from digenrl.extensions.planner.records import MOST_STEPS, Simulated
from digenrl.extensions.planner.virtual_cluster import (
    Cluster,
    Disturbance,
    VirtualRank,
    coarsen_run,
)
from digenrl.extensions.planner.virtual_run import simulate_until_steady
from digenrl.extensions.planner.workload import Drawn
from digenrl.recompute import Recompute

COARSE_RANKS = 8
"""Fewest ranks of a quick simulation."""
QUICK_STEPS = 9
"""Most RL steps of a quick simulation."""
JITTER = Disturbance(jitter=0.05)
JITTER_STEPS = 7
"""RL steps of a simulation with jitter."""
SLOW_RANK = 1.15
"""Factor on the durations of one rank."""
SLOWER_GENERATION = 1.2
"""Factor on the assumed denoising time in the plan's sensitivity check."""


class Limit(TypedDict):
    """A cause that separates a candidate's step from the bound, as plan.json has it."""

    cause: str
    seconds: float
    """Seconds per step."""


@dataclass(frozen=True)
class CandidateOutcome:
    """Result of simulating a candidate."""

    costing: Costing
    candidate: Candidate
    result: Simulated
    bound_s: float
    quick_s: float | None = None
    """Seconds per step of the quick simulation, or None if there was none."""
    coarse: bool = False
    """Whether an event of the simulation stands for what several ranks do."""

    @property
    def step_s(self) -> float:
        """Seconds per step, at least those in which judges score its samples."""
        return max(self.result.step_s, self.costing.costs.judged_seconds())

    @property
    def expected_s(self) -> float:
        """Seconds per step, at least the candidate's floor.

        A run that has not settled may still consume a buffer of samples, and then looks faster than
        it is.
        """
        return max(self.step_s, self.costing.step_floor(self.candidate))

    @property
    def efficiency(self) -> float:
        return self.bound_s / self.step_s

    @property
    def bubble(self) -> dict[str, float]:
        """Share of all GPU time spent waiting, by cause."""
        total = self.step_s * self.costing.hardware.gpus * self.result.steps
        table: dict[str, float] = {}
        for (_, stage, cause), seconds in self.result.seconds.items():
            if stage == "wait":
                table[cause] = table.get(cause, 0.0) + seconds / total
        return table

    def rollouts_evaluate(self, drawn: Drawn) -> bool:
        """Return whether rollouts evaluate while trainers go on."""
        able = self.costing.work.rollouts_evaluate and self.candidate.rollouts > 0
        return able and trainers_evaluate(self.costing, drawn, self.candidate) is None

    def evaluation_s(self, drawn: Drawn) -> float:
        """Return the seconds that an evaluation adds to its RL step.

        If trainers evaluate, they do nothing else meanwhile, so all of its time counts. If rollouts
        evaluate, they begin when their tasks are done and trainers wait for them before the update.
        Then only the part counts that outlasts the rollouts' normal wait for the update.
        """
        candidate, costing = self.candidate, self.costing
        rollouts = self.rollouts_evaluate(drawn)
        once = evaluation_seconds(costing, drawn, candidate, rollouts)
        if not rollouts:
            return once
        cluster = costing.build_cluster(candidate)
        waits = [
            s
            for (_, stage, cause), s in self.result.seconds.items()
            if (stage, cause) == ("wait", "weights")
        ]
        # Rollouts spend this part of their wait for weights while the update itself runs, when it
        # is too late to evaluate.
        after = (
            cluster.reduce_seconds
            + cluster.optimizer_seconds
            + cluster.snapshot_seconds
            + cluster.publish_seconds
        )
        return max(
            0.0, once - max(0.0, sum(waits) / self.result.steps / candidate.rollouts - after)
        )

    @property
    def settled(self) -> bool:
        """Whether the seconds per step become steady. If not, `step_s` means little and the
        candidate never wins."""
        return self.result.settled

    def simulated_seconds(
        self,
        cluster: Cluster | None = None,
        disturbance: Disturbance | str | None = None,
        steps: int | None = None,
    ) -> float:
        """Return the seconds per step of a quick simulation with other durations or with a
        disturbance.

        Args:
            cluster: durations; None = those of the candidate.
            disturbance: what to disturb. The name of a role slows one of its ranks by `SLOW_RANK`.
            steps: RL steps to simulate; None = until the step no longer changes.
        """
        cluster = cluster or self.costing.build_cluster(self.candidate)
        real = len(cluster.ranks)
        spec, cluster = coarsen_run(
            self.costing.schedule_spec(self.candidate), cluster, COARSE_RANKS
        )
        if isinstance(disturbance, str):
            last = (cluster.trainers if disturbance == "trainer" else cluster.rollouts)[-1].rank
            # One rank of the coarse cluster stands for several. Of these only one is slow, which
            # rollouts average out. Trainers wait for the slowest, so there the whole factor counts.
            together = real / len(cluster.ranks) if disturbance == "rollout" else 1.0
            disturbance = Disturbance(stragglers={last: 1 + (SLOW_RANK - 1) / together})
        return simulate_until_steady(spec, cluster, steps, QUICK_STEPS, disturbance).step_s

    @cached_property
    def _quick_s(self) -> float:
        return self.simulated_seconds() if self.quick_s is None else self.quick_s

    @cached_property
    def jitter_s(self) -> float:
        """Seconds per step when every duration varies by 5%."""
        return self._scale_to_exact(self.simulated_seconds(None, JITTER, steps=JITTER_STEPS))

    @cached_property
    def slow_rank_s(self) -> float:
        """Seconds per step when one rank is 15% slower: the mean over the choices of this rank."""
        trainers, rollouts = self.candidate.trainers, self.candidate.rollouts
        total = trainers * self.simulated_seconds(None, "trainer")
        total += rollouts * self.simulated_seconds(None, "rollout") if rollouts else 0.0
        return self._scale_to_exact(total / (trainers + rollouts))

    def _scale_to_exact(self, seconds: float) -> float:
        """Correct a quick figure by the ratio of the exact and the quick simulation without
        disturbances."""
        return seconds * self.step_s / self._quick_s

    @cached_property
    def robust_s(self) -> float:
        """Seconds per step of an imperfect cluster: the mean of `jitter_s` and `slow_rank_s`."""
        return (self.jitter_s + self.slow_rank_s) / 2

    @cached_property
    def slower_generation_s(self) -> float:
        """Seconds per step if denoising takes `SLOWER_GENERATION` times as long as assumed."""
        cluster = self.costing.build_cluster(self.candidate)
        ranks = tuple(
            replace(rank, step_seconds=SLOWER_GENERATION * rank.step_seconds)
            for rank in cluster.ranks
        )
        return self._scale_to_exact(self.simulated_seconds(replace(cluster, ranks=ranks)))

    @cached_property
    def compiled_s(self) -> float:
        """Seconds per step with model.compile=true, by the figures of `gpus.ENGINES`."""
        compiled = replace(self.costing, work=replace(self.costing.work, engine="compiled"))
        return self._scale_to_exact(self.simulated_seconds(compiled.build_cluster(self.candidate)))

    @cached_property
    def limits(self) -> list[Limit]:
        """Causes that separate the step from the bound, with their seconds per step, the largest
        first.

        The causes are switched off one after the other. Each counts by how much the simulated step
        becomes shorter. What remains is waiting (start of a step, uneven parts) and placement,
        which the bound of the ranks' roles separates. All of them sum to the difference between
        step and bound.
        """
        found, before = {}, self._quick_s
        last = self.costing.build_cluster(self.candidate)
        for cause, cluster in self._clusters_without_causes():
            after = before if cluster == last else self.simulated_seconds(cluster)
            found[cause], before, last = before - after, after, cluster
        roles = bound_of_roles(self.costing, self.candidate)
        found["waiting"] = before - roles + self.step_s - self._quick_s
        found["placement"] = roles - self.bound_s
        ordered = sorted(found.items(), key=lambda item: -abs(item[1]))
        return [
            {"cause": cause, "seconds": seconds}
            for cause, seconds in ordered
            if abs(seconds) > 1e-9
        ]

    def _clusters_without_causes(self) -> Iterator[tuple[str, Cluster]]:
        """Yield each cause with a cluster that lacks the causes up to here."""
        costing, spec, costs = self.costing, self.candidate.spec, self.costing.costs
        cluster, size, work = costing.build_cluster(self.candidate), spec.task_size, costing.work
        units = seconds_per_unit(costing)
        pools = {pool.name: pool for pool in costing.hardware.pools}

        def change_ranks(change: Callable[[VirtualRank], VirtualRank]) -> tuple[VirtualRank, ...]:
            return tuple(map(change, cluster.ranks))

        def best_seconds(stage: str, rank: VirtualRank) -> float:
            return size * (units[stage][rank.pool] or 0.0)

        free = change_ranks(
            lambda rank: replace(rank, adopt_seconds=0.0, fetch_seconds=0.0, send_seconds=0.0)
        )
        cluster = replace(
            cluster, ranks=free, publish_seconds=0.0, snapshot_seconds=0.0, deliver_seconds=0.0
        )
        yield "publication, transfers, CPU scorers", cluster
        alone = change_ranks(
            lambda rank: replace(
                rank,
                step_seconds=costs.step_seconds(pools[rank.pool], size),
                exposed_seconds=0.0,
            )
        )
        cluster = replace(cluster, ranks=alone, reduce_seconds=0.0)
        yield "communication", cluster
        cluster = replace(cluster, optimizer_seconds=0.0, switch_seconds=0.0)
        yield "optimizer, switches", cluster

        def without_recompute(rank: VirtualRank) -> VirtualRank:
            plain = costs.cell_seconds(pools[rank.pool], size, spec.tsp_batch, Recompute())
            cell = plain / spec.context if rank.role == "trainer" else 0.0
            return replace(rank, cell_seconds=cell)

        cluster = replace(cluster, ranks=change_ranks(without_recompute))
        yield "recomputation", cluster

        def at_best_batch(rank: VirtualRank) -> VirtualRank:
            cell = best_seconds("train", rank) / spec.context if rank.role == "trainer" else 0.0
            step = best_seconds("generate", rank) / work.steps
            return replace(rank, cell_seconds=cell, step_seconds=step)

        cluster = replace(cluster, ranks=change_ranks(at_best_batch))
        yield "batch sizes, launches", cluster
        # Encoding each prompt once is part of the bound; a prompt that several ranks encode is the
        # repetition.
        spent = {
            pool: s for (pool, stage, _), s in self.result.seconds.items() if stage == "encode"
        }
        paid = {rank.pool: rank.encode_seconds for rank in cluster.ranks}
        times = (
            sum(seconds / paid[pool] for pool, seconds in spent.items() if paid[pool])
            / self.result.steps
        )
        once = min(1.0, work.prompts / times) if times else 1.0

        def with_resident_encoders(rank: VirtualRank) -> VirtualRank:
            encode = once * (units["encode"][rank.pool] or 0.0)
            return replace(rank, encode_seconds=encode, decode_seconds=best_seconds("decode", rank))

        cluster = replace(cluster, ranks=change_ranks(with_resident_encoders))
        yield "encoders: residence, repetition", cluster


def simulate_candidate(
    costing: Costing,
    candidate: Candidate,
    bound_s: float,
    exact: bool = False,
    trace: bool = False,
    steps: int | None = None,
    cutoff_s: float = math.inf,
) -> CandidateOutcome:
    """Simulate `candidate`.

    Args:
        exact: simulate every rank by itself. Otherwise quick: what equal ranks do at the same time
            is one event.
        trace: keep the spans.
        steps: RL steps to simulate; None = until the step no longer changes.
        cutoff_s: seconds per step above which a run is stopped early; see `steady`.
    """
    spec, cluster = costing.schedule_spec(candidate), costing.build_cluster(candidate)
    if not exact:
        spec, cluster = coarsen_run(spec, cluster, COARSE_RANKS)
    most = MOST_STEPS if exact else QUICK_STEPS
    result = simulate_until_steady(spec, cluster, steps, most, trace=trace, cutoff_s=cutoff_s)
    if exact:
        return CandidateOutcome(costing, candidate, result, bound_s)
    # A search keeps many of these, and needs only their seconds.
    result = replace(result, made=(), trained=())
    return CandidateOutcome(
        costing, candidate, result, bound_s, result.step_s, cluster.whole is not None
    )
