"""What the ranks of a node keep in host memory, in bytes.

trainers     off-loaded activations; the published weights that they lend with, where all are trained
trainer 0    published versions, for ranks that join and for a resumed run; pictures of an evaluation
rollouts     a version that has arrived, until it is adopted; with asynchrony the next one beside it.
             Once on trainer 0's machine (`transport/node_memory.py`), on others also where it arrived.
slow lines   at both ends one version more, from which the next one differs (`transport/compress.py`)
"""  # noqa: E501

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from digenrl.extensions.planner.links import carries_differences
from digenrl.extensions.planner.memory import (
    GIB,
    lent_copy_bytes,
    published_bytes,
    version_bytes,
)
from digenrl.extensions.planner.workload import Workload
from digenrl.hardware import Hardware
from digenrl.schedule import ScheduleSpec


def host_gib(
    work: Workload,
    spec: ScheduleSpec,
    hardware: Hardware,
    placed: Sequence[tuple[str, str]],
    trainer: Mapping[str, float],
) -> dict[str, float]:
    """Return pool -> GiB that the ranks of its fullest node keep in host memory.

    Args:
        placed: (pool, role) of every rank; a pool's ranks fill its nodes in order.
        trainer: pool -> bytes of each of its trainers.
    """
    seats, nodes = Counter[str](), Counter[tuple[str, int]]()
    rollouts, home = Counter[tuple[str, int]](), (placed[0][0], 0)
    for name, role in placed:
        node = name, seats[name] // hardware.find_pool(name).per_node
        seats[name] += 1
        nodes[node] += int(trainer[name]) if role == "trainer" else 0
        rollouts[node] += role == "rollout"
    lines = {name: hardware.line_between(home[0], name) for name, _ in nodes}
    slow = {name for name, line in lines.items() if line and carries_differences(work, line)}
    nodes[home] += version_bytes(work) * bool(slow)  # what the next version will differ from
    for node, count in rollouts.items():
        nodes[node] += version_bytes(work) * (node[0] in slow and count > 0)
        copies = min(count, 1 if node == home else 2 if work.relayed else count)
        nodes[node] += copies * (1 + spec.async_steps) * version_bytes(work)
    nodes[home] += published_bytes(work, spec.async_steps) + evaluation_bytes(work)
    fullest = dict[str, float]()
    for (name, _), size in nodes.items():
        fullest[name] = max(fullest.get(name, 0.0), size / GIB)
    return fullest


def evaluation_bytes(work: Workload) -> int:
    """Return the bytes of an evaluation's pictures on trainer 0: its pieces, and all joined, in 8
    bits a value."""
    return 2 * work.evaluated_samples * work.frames * work.height * work.width * 3


def lent_bytes(work: Workload, spec: ScheduleSpec, rollouts: int, shards: int) -> int:
    """Return the bytes of a trainer's copy of the published weights in host memory. Only a model
    whose weights are all trained has the copy there."""
    lends = spec.tag and rollouts > 0 and work.lora_rank is None
    return lent_copy_bytes(work, shards) if lends else 0
