"""TSP: the placement of cells on trainer ranks and in micro-batches.

A *block* is (task of the fragment, K of its trained steps). Without `tsp_shard` all blocks of a
task are on one rank, with it they are spread over the ranks. Shares give a rank blocks in
proportion to its speed. The *number* of micro-batches is the same on every rank, because of
collectives; their size is not. Trainers that share the tokens of a forward (`context`) are placed
as one, and all of them get its blocks.

Invariants:
1. I2: every block is placed exactly once (on all ranks of one context group).
2. All ranks have equally many micro-batches.
3. The placement is a pure function of (spec, trainers, fragment), so producers and consumers agree
   without talking.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from digenrl.schedule.order import update_fragments
from digenrl.schedule.spec import ScheduleSpec


class Block(NamedTuple):
    """Cells of one task at `steps` (positions 0..S-1 among the trained steps, not denoising-step
    indices)."""

    group: int
    part: int
    """Number of the task within its group."""
    steps: tuple[int, ...]


def fragment_blocks(spec: ScheduleSpec, fragment: tuple[int, ...]) -> tuple[Block, ...]:
    """Return every block of a fragment, group-first.

    Example:
        >>> spec = ScheduleSpec(prompts=4, group_size=8, task_size=4, denoise_steps=10,
        ...                     trained_steps=4, gap=1, tsp_batch=2)
        >>> [(block.part, block.steps) for block in fragment_blocks(spec, fragment=(1,))]
        [(0, (0, 1)), (0, (2, 3)), (1, (0, 1)), (1, (2, 3))]
    """
    step_ranges = [
        tuple(range(i, min(i + spec.tsp_batch, spec.trained_steps)))
        for i in range(0, spec.trained_steps, spec.tsp_batch)
    ]
    return tuple(
        Block(group, part, steps)
        for group, portion in zip(spec.groups_of(fragment), fragment, strict=True)
        for part in spec.parts_of(portion)
        for steps in step_ranges
    )


def apportion_units(units: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Split `units` in proportion to `shares` (largest remainder; ties to the lower rank). The
    parts sum to `units`.

    Example:
        >>> apportion_units(10, shares=(3.0, 1.0, 1.0))
        (6, 2, 2)
        >>> apportion_units(4, shares=(1.0, 1.0, 1.0))
        (2, 1, 1)
    """
    total = sum(shares)
    exact = [units * share / total for share in shares]
    # The small term keeps an exact quotient such as 2.9999999996 from losing a unit.
    counts = [math.floor(e + 1e-9) for e in exact]
    by_remainder = sorted(range(len(shares)), key=lambda r: (counts[r] - exact[r], r))
    for rank in by_remainder[: units - sum(counts)]:
        counts[rank] += 1
    return tuple(counts)


Placement = tuple[tuple[tuple[Block, ...], ...], ...]
"""placement[rank][micro_batch] = blocks of one fragment."""


@lru_cache(maxsize=4096)
def place_fragment(spec: ScheduleSpec, trainers: int, fragment: tuple[int, ...]) -> Placement:
    """Return placement[rank][micro_batch] = blocks. An empty tuple is a micro-batch that only joins
    collectives.

    Example:
        Two trainers divide the steps of each task. In group 1 the second one begins:

        >>> spec = ScheduleSpec(prompts=4, group_size=8, task_size=4, denoise_steps=10,
        ...                     trained_steps=4, gap=1, tsp_batch=2, tsp_shard=True)
        >>> placement = place_fragment(spec, trainers=2, fragment=(1,))
        >>> [[[(b.part, b.steps) for b in micro] for micro in own] for own in placement]
        [[[(0, (2, 3))], [(1, (2, 3))]], [[(0, (0, 1))], [(1, (0, 1))]]]
    """
    if trainers % spec.context:
        raise ValueError(f"parallel.context = {spec.context} must divide the {trainers} trainers.")
    if spec.context > 1:
        seats = place_fragment(replace(spec, context=1), trainers // spec.context, fragment)
        return tuple(own for own in seats for _ in range(spec.context))
    shares = spec.shares or (1.0,) * trainers
    if len(shares) != trainers:
        raise ValueError(
            f"schedule.shares has {len(shares)} entries for {trainers} trainers: give one per rank."
        )
    blocks = fragment_blocks(spec, fragment)
    unit = 1 if spec.tsp_shard else spec.blocks_per_task
    units = [blocks[i : i + unit] for i in range(0, len(blocks), unit)]
    equal = not spec.measured_shares and all(share == shares[0] for share in shares)
    counts = apportion_units(len(units), shares)
    turn = (
        fragment[0] // max(1, spec.fragment_groups) % trainers
    )  # odd units go round the ranks, not always to rank 0
    owned: list[list[Block]] = []
    start = 0
    for rank, count in enumerate(counts):
        # Equal ranks take the steps of a task in turn, so that each has its part of whatever tasks
        # turn out useful.
        mine = (
            units[(rank - turn) % trainers :: trainers] if equal else units[start : start + count]
        )
        owned.append([block for part in mine for block in part])
        start += count
    # With unequal shares an average size bounds the count, and fast ranks get larger micro-batches.
    micro = max(len(o) for o in owned) if equal else math.ceil(len(blocks) / trainers)
    return tuple(_split_blocks(o, micro) for o in owned)


@lru_cache(maxsize=4096)
def without_useless_tasks(placement: Placement, useless: frozenset[tuple[int, int]]) -> Placement:
    """Return `placement` without the tasks (group, part) that have no gradient.

    The number of micro-batches stays the same. The first ones are empty on every rank.

    Example:
        >>> steps = (0, 1, 2)
        >>> placement = (((Block(0, 0, steps),), (Block(0, 1, steps),)),)  # one rank
        >>> without_useless_tasks(placement, frozenset({(0, 1)}))
        (((), (Block(group=0, part=0, steps=(0, 1, 2)),)),)
    """
    if not useless:
        return placement
    rests = [
        [b for micro in own for b in micro if (b.group, b.part) not in useless] for own in placement
    ]
    widths = [max(1, *(len(micro) for micro in own)) for own in placement]
    # No micro-batch may grow (memory), and all ranks need equally many (collectives).
    needed = max(math.ceil(len(rest) / width) for rest, width in zip(rests, widths, strict=True))
    idle = ((),) * (len(placement[0]) - needed)
    return tuple(idle + (_split_blocks(rest, needed) if needed else ()) for rest in rests)


def _split_blocks(blocks: list[Block], micro: int) -> tuple[tuple[Block, ...], ...]:
    """Split `blocks` into `micro` consecutive runs whose lengths differ by at most one, longer runs
    first."""
    base, extra = divmod(len(blocks), micro)
    runs, start = [], 0
    for i in range(micro):
        size = base + (i < extra)
        runs.append(tuple(blocks[start : start + size]))
        start += size
    return tuple(runs)


def micro_batches_per_update(spec: ScheduleSpec, trainers: int) -> int:
    """Count the micro-batches of one optimizer update on every trainer rank: Lightning's
    accumulate_grad_batches."""
    return sum(
        len(place_fragment(spec, trainers, fragment)[0]) for fragment in update_fragments(spec, 0)
    )


@lru_cache(maxsize=4096)
def cells_by_rank(
    spec: ScheduleSpec, trainers: int, lockstep: bool, fragment: tuple[int, ...]
) -> tuple[int, ...]:
    """Count the cells (one task at one trained step) of `fragment` that occupy each trainer, if all
    are useful.

    Sharded trainers wait for the largest micro-batch of all.
    """
    placement = place_fragment(spec, trainers, fragment)
    cells = [[sum(len(block.steps) for block in micro) for micro in own] for own in placement]
    if lockstep:
        return (sum(max(column) for column in zip(*cells, strict=True)),) * trainers
    return tuple(sum(own) for own in cells)
