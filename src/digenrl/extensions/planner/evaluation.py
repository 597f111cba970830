"""Seconds of an evaluation, and which ranks had better make it."""

from __future__ import annotations

import math

from digenrl.extensions.planner.candidate import Candidate
from digenrl.extensions.planner.costing import Costing
from digenrl.extensions.planner.workload import Drawn
from digenrl.hardware import Pool


def evaluation_seconds(
    costing: Costing, drawn: Drawn, candidate: Candidate, rollouts: bool | None = None
) -> float:
    """Return the seconds of one evaluation: generating, decoding and scoring what is `drawn`.

    Rollouts take the next prompt as soon as they are free. Trainers get equally many prompts
    each, and wait for the slowest.

    Args:
        rollouts: whether rollouts evaluate; None: where they can.
    """
    if rollouts is None:
        rollouts = costing.work.rollouts_evaluate and candidate.rollouts > 0
    costs, room = costing.costs, costing.work.evaluated or drawn.samples

    def forward_seconds(pool: Pool, samples: int) -> float:
        at_once = max(1, min(samples, room))
        return samples * costs.step_seconds(pool, at_once) / at_once

    def prompt_seconds(pool: Pool) -> float:
        seconds = drawn.steps * forward_seconds(pool, drawn.samples)
        seconds += 2 * costing.work.steps * forward_seconds(pool, drawn.compared)
        seconds += drawn.samples * (costs.decode_seconds(pool, 1) + costs.score_seconds(pool, 1))
        return seconds + costs.encode_seconds(pool)

    if not rollouts:
        return math.ceil(drawn.prompts / candidate.trainers) * max(
            prompt_seconds(pool) for pool in costing.hardware.pools
        )
    names = [name for name, _ in costing.place_ranks(candidate).ranks[candidate.trainers :]]
    seconds = [prompt_seconds(costing.hardware.find_pool(name)) for name in names]
    ends = [0.0] * len(names)
    for _ in range(drawn.prompts):
        soonest = min(range(len(names)), key=lambda rank: ends[rank])
        ends[soonest] += seconds[soonest]
    return max(ends)


def trainers_evaluate(costing: Costing, drawn: Drawn, candidate: Candidate) -> str | None:
    """Return why trainers evaluate although rollouts could: few rollouts keep many trainers
    waiting. None: rollouts do, or cannot.

    The step's lower bound counts as the time in which trainers do not wait for rollouts.
    """
    work = costing.work
    if not (work.evaluation_auto and work.rollouts_evaluate and candidate.rollouts):
        return None
    alone = evaluation_seconds(costing, drawn, candidate, rollouts=True)
    together = evaluation_seconds(costing, drawn, candidate, rollouts=False)
    if alone - costing.step_floor(candidate) <= together:
        return None
    return (
        f"{candidate.rollouts} rollouts would take {alone:.0f} s, and {candidate.trainers} "
        f"trainers take {together:.0f} s"
    )
