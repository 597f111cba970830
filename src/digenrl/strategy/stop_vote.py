"""Giving a step up: every trainer drops the step in progress at the same place, or none does.

What has begun together must end together: a trainer that left alone would leave the others in a collective for ever.
The work is counted in pieces that need all trainers: an update where they are replicas, a micro-batch where weights are
sharded, a denoising step where all of them sample. Trainer 0 grants each piece, or gives the step up in its place; the
others wait for its word on the store. Nothing of a dropped step stays: gradients alone were summed up, and of several
updates the state before the first is kept (`callbacks.checkpoint`) where an adapter is trained. Whole weights would not
fit beside themselves: there the updates that follow the first are finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from digenrl.cluster.control import Control
from digenrl.cluster.world import World
from digenrl.types import StepGivenUp

_POLL_S = 0.001
_SELDOM_S = 0.05
"""Between two looks at the store from within a task, however short its denoising steps are."""


class StopVote:
    """One trainer's view of the pieces.

    Args:
        sharded: every forward is a collective of the trainers.
        droppable: whether the step in progress could be dropped now: nothing of it has been applied, or what it changed
            is kept. Asked on trainer 0.
    """

    def __init__(self, control: Control, world: World, sharded: bool, droppable: Callable[[], bool]) -> None:
        self._control, self._world, self._sharded, self._droppable = control, world, sharded, droppable
        self._piece = 0
        self._looked = 0.0

    def check(self) -> None:
        """Between pieces.

        Raises:
            StepGivenUp: this trainer's next piece will not be begun.
        """
        if self._world.rank == 0:
            if self._control.get("give_up") is not None and self._droppable():
                self._control.set("given_up", str(self._piece))
                raise StepGivenUp
        elif (first := self._control.get("given_up")) is not None and self._piece >= int(first):
            raise StepGivenUp

    def between_steps(self) -> None:
        """Between two denoising steps of a task. Raises: see `check`."""
        if time.monotonic() - self._looked > _SELDOM_S:
            self._looked = time.monotonic()
            self.check()

    def begin(self, pause: Callable[[float], object] = time.sleep) -> None:
        """A piece begins, on every trainer.

        Args:
            pause: what a trainer does that waits for trainer 0's word, for so many seconds at most.

        Raises: see `check`.
        """
        self.check()
        if self._world.rank == 0 and self._world.trainers > 1:
            self._control.set("granted", str(self._piece))
        while self._world.rank > 0 and int(self._control.get("granted") or -1) < self._piece:
            self._control.check()
            self.check()
            pause(_POLL_S)
        self._piece += 1

    def begin_micro_batch(self) -> None:
        """A micro-batch begins. Raises: see `check`."""
        self.begin() if self._sharded else self.check()

    def begin_update(self) -> None:
        """The gradients of an update are complete. Raises: see `check`."""
        if not self._sharded:
            self.begin()
