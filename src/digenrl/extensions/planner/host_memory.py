"""What the ranks of a node keep in host memory, in bytes.

trainers     off-loaded activations; the published weights that they lend with, where all are trained
trainer 0    published versions, for ranks that join and for a resumed run; pictures of an evaluation
rollouts     a version that has arrived, until it is adopted; with asynchrony the next one beside it
"""  # noqa: E501

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from digenrl.extensions.planner.memory import (
    GIB,
    lent_copy_bytes,
    offloaded_bytes,
    published_bytes,
    version_bytes,
)
from digenrl.extensions.planner.workload import Workload

if TYPE_CHECKING:
    from digenrl.extensions.planner.candidate import Candidate
    from digenrl.extensions.planner.costing import Costing
    from digenrl.hardware import Pool


def host_gib(costing: Costing, candidate: Candidate) -> dict[str, float]:
    """Return pool -> GiB that the ranks of its fullest node keep in host memory."""
    placed = costing.placed(candidate)
    each = {kind: _rank_bytes(costing, candidate, *kind) for kind in costing.kinds(candidate)}
    seats, nodes = Counter[str](), Counter[tuple[str, int]]()
    for name, role in placed:  # a pool's ranks fill its nodes in order
        nodes[name, seats[name] // costing.hardware.pool(name).per_node] += each[name, role]
        seats[name] += 1
    work, spec = costing.work, candidate.spec
    nodes[placed[0][0], 0] += published_bytes(work, spec.async_steps) + evaluation_bytes(work)
    fullest = dict[str, float]()
    for (name, _), size in nodes.items():
        fullest[name] = max(fullest.get(name, 0.0), size / GIB)
    return fullest


def evaluation_bytes(work: Workload) -> int:
    """Return the bytes of an evaluation's pictures on trainer 0: its pieces, and all joined, in 8
    bits a value."""
    return 2 * work.evaluated_samples * work.frames * work.height * work.width * 3


def lent_bytes(costing: Costing, candidate: Candidate) -> int:
    """Return the bytes of a trainer's copy of the published weights in host memory. Only a model
    whose weights are all trained has the copy there."""
    lends = candidate.spec.tag and candidate.rollouts > 0 and costing.work.lora_rank is None
    return lent_copy_bytes(costing.work, costing.shards(candidate)) if lends else 0


def _rank_bytes(costing: Costing, candidate: Candidate, name: str, role: str) -> int:
    """Return the bytes of one rank of a role on a pool, without those of trainer 0 alone."""
    pool = costing.hardware.pool(name)
    if role == "rollout":
        return _arriving_bytes(costing.work, candidate, pool)
    rows = (
        candidate.spec.task_size
        * candidate.spec.tsp_batch
        * costing.blocks_at_once(candidate, pool)
        * costing.work.trained_passes
    )
    kept = costing.recompute(candidate, pool)
    waiting = offloaded_bytes(costing.work, rows, kept, candidate.spec.context)
    return int(waiting) + lent_bytes(costing, candidate)


def _arriving_bytes(work: Workload, candidate: Candidate, pool: Pool) -> int:
    """Return the bytes of the versions that a rollout receives. Each rollout has memory of its own
    for them, which the process keeps for the next version."""
    return (1 + candidate.spec.async_steps) * version_bytes(work)
