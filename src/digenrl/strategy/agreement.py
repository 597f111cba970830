"""Decisions of trainer 0 that all trainers follow, because their forwards are collectives."""

from __future__ import annotations

from digenrl.cluster.control import Control
from digenrl.cluster.world import World
from digenrl.record.progress import Progress


class Agreement:
    """One trainer's view of the decisions, which are numbered alike on every trainer.

    Decisions travel over the control store. A collective would not do: trainer 0 may need longer for a decision than a
    collective may last. A replica may be several decisions behind.
    """

    def __init__(self, control: Control, world: World, progress: Progress) -> None:
        self._control, self._world, self._progress = control, world, progress
        self._taken = 0
        """Decisions taken so far."""
        self._forgotten = 0
        """Decisions whose keys have been deleted."""

    def choose(self, choice: int) -> int:
        """Return trainer 0's `choice` on every trainer."""
        self._taken += 1
        key = f"agreed/{self._taken}"
        if self._world.rank != 0:
            with self._progress.stage("wait straggler"):
                return int(self._control.wait_for(key, "trainer 0 to decide what all do next"))
        self._control.set(key, str(choice))
        return choice

    def forget(self) -> None:
        """Delete the keys of all decisions so far. Call this after a collective: all have read the keys then."""
        for number in range(self._forgotten, self._taken) if self._world.rank == 0 else ():
            self._control.delete(f"agreed/{number + 1}")
        self._forgotten = self._taken
