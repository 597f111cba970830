"""What each unit of trainers trains of a fragment in a virtual run, and for how long."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from digenrl.extensions.planner.virtual_cluster import Cluster, micro_batches
from digenrl.schedule import ScheduleSpec, update_fragments


class FragmentWork:
    """Fragments of an update, and the seconds that they take.

    Args:
        spec: the schedule.
        cluster: durations of each rank.
        cells: fragment -> cells of each trainer.
        factor: rank -> factor on its next duration (jitter, stragglers).
        jitter: whether equal work takes another time each time.
    """

    def __init__(
        self,
        spec: ScheduleSpec,
        cluster: Cluster,
        cells: Callable[[tuple[int, ...]], Sequence[int]],
        factor: Callable[[int], float],
        jitter: bool,
    ) -> None:
        self._spec, self._cells, self._factor = spec, cells, factor
        whole = cluster.whole
        if whole is None or len(whole[1].units) != len(cluster.units):
            whole = spec, cluster
        self._micro_batches = functools.cache(functools.partial(micro_batches, *whole))
        self._members = {
            ranks: [(ranks[i * len(ranks) // len(own)], member) for i, member in enumerate(own)]
            for ranks, own in zip(cluster.units, whole[1].units, strict=True)
        }
        """Unit -> (its rank, trainer whose cells determine how long the unit trains). A coarsened
        run takes the trainers of the whole run if both have the same units, because who waits for
        whom depends on the cells of every trainer."""
        self.seconds = (
            self._micro_batch_seconds if jitter else functools.cache(self._micro_batch_seconds)
        )
        """(ranks of a unit, fragment) -> seconds of each micro-batch."""
        self.pending = functools.cache(self._pending_fragments)
        """(rank, update) -> fragments of the update, in the order in which the rank trains them."""

    def _micro_batch_seconds(
        self, ranks: tuple[int, ...], fragment: tuple[int, ...]
    ) -> tuple[float, ...]:
        """Return the seconds of each micro-batch of `fragment` on a unit: those of its slowest
        rank."""
        table, factor = self._micro_batches(fragment), self._factor
        rows = [
            [own * factor(rank) for own in table[member]] for rank, member in self._members[ranks]
        ]
        return tuple([max(column) for column in zip(*rows, strict=True)])

    def _pending_fragments(self, rank: int, update: int) -> list[tuple[int, ...]]:
        # As in the runtime, a trainer begins with the fragments that have cells for it.
        return sorted(
            update_fragments(self._spec, update), key=lambda part: not self._cells(part)[rank]
        )
