"""What trainers do together: trainer 0's choices (`Agreement`), and giving a step up. Every trainer
drops the step in progress at the same place, or none does (`StopVote`).

A trainer that left alone would leave the others in a collective for ever. So the work is counted in
pieces that need all trainers: an update (replicas), a micro-batch (sharded weights), a denoising
step (all of them sample). When every trainer has come to a piece, trainer 0 grants it, or gives the
step up in its place. Until then all wait on the store and in no collective. A trainer may wait for
cells that never come: the rollout that made them sent them to the others, and died.

Nothing of a dropped step stays. Before the first update only gradients were summed up. Between
updates an adapter's state before the first one is kept (`callbacks.checkpoint`). Whole weights
would not fit twice, so their remaining updates are finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from digenrl.cluster.control import Control
from digenrl.cluster.world import World
from digenrl.record.progress import Progress
from digenrl.types import StepGivenUp, out_of_memory

_POLL_S = 0.001
_SELDOM_S = 0.05
"""Seconds between two looks at the store from within a task, however short its denoising steps
are, and in a long wait."""
_SHARE = 0.05
"""Share of a wait for the other trainers that may pass between two looks. If 32 trainers looked
every millisecond, they would keep the store busy while one of them computes."""


class StopVote:
    """One trainer's view of the pieces, which are numbered alike on every trainer.

    Args:
        sharded: whether every forward is a collective of the trainers.
        droppable: returns whether the step in progress could be dropped now: nothing of it has been
            applied, or the state before it is kept. Asked on trainer 0.
    """

    def __init__(
        self,
        control: Control,
        world: World,
        progress: Progress,
        sharded: bool,
        droppable: Callable[[], bool],
    ) -> None:
        self._control, self._world, self._progress = control, world, progress
        self._sharded, self._droppable = sharded, droppable
        self._piece = 0
        """Number of the next piece."""
        self._looked = 0.0
        """Second of the monotonic clock of the last look at the store."""

    def check_for_stop(self, *keys: str) -> list[str | None]:
        """Look, between two pieces, whether the run is aborted or the step is given up. Return the
        values of `keys` on the store at the same moment.

        Raises:
            Aborted: somebody has aborted the run.
            StepGivenUp: this trainer's next piece will not be begun.
        """
        first, *values = self._control.check_abort(
            "given_up" if self._world.rank else "give_up", *keys
        )
        if self._world.rank == 0:
            if first is not None and self._droppable():
                self._control.set("given_up", str(self._piece))
                raise StepGivenUp
        # A trainer that has not yet seen the grant of a piece still finishes it: its peers are
        # inside it.
        elif first is not None and self._piece >= int(first):
            raise StepGivenUp
        return values

    @contextmanager
    def memory_guarded(self) -> Iterator[None]:
        """Turn an out-of-memory error of the body into the end of the run at the step before.

        The error itself is raised if the others cannot leave the step in progress: it is partly
        applied, or they wait in a collective for this trainer.

        Raises:
            StepGivenUp: every trainer drops the step in progress.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            if not self._sharded and self._droppable():
                cause = out_of_memory(self._world.rank, self._progress.said, error)
                self._control.request_stop(cause)
                self._control.set("give_up", "1")
                # This trainer comes to the next piece like the others, so that all of them drop the
                # step there.
                self.begin_piece()
            raise

    def between_steps(self) -> None:
        """Look between two denoising steps of a task, but seldom: each look is a request. Raises:
        see `check_for_stop`."""
        if time.monotonic() - self._looked > _SELDOM_S:
            self._looked = time.monotonic()
            self.check_for_stop()

    def begin_piece(self, pause: Callable[[float], object] = time.sleep) -> None:
        """Begin a piece, on every trainer. When all have come to it, trainer 0 grants it, and the
        others wait for the grant.

        Args:
            pause: called between two looks with the seconds that it may take.

        Raises: see `check_for_stop`.
        """
        rank, others = self._world.rank, self._world.trainers - 1
        # Trainer 0 waits until the others have added 1 each to `arrived`, for each piece so far.
        # They wait until `granted` has counted this piece.
        key, awaited = ("granted", 1) if rank else ("arrived", others)
        self._control.add("arrived", int(rank > 0))
        came = time.monotonic()
        with self._progress.stage("wait straggler"):
            while True:
                (come,) = self.check_for_stop(
                    key
                )  # who has come has said before whether it can go on
                if int(come or 0) >= awaited * (self._piece + 1):
                    break
                # A look costs the store a request: after 0.2 s of waiting, the next one comes in 10
                # ms.
                pause(min(max(_POLL_S, _SHARE * (time.monotonic() - came)), _SELDOM_S))
        self._piece += 1
        if rank == 0:
            self._control.set("granted", str(self._piece))

    def begin_micro_batch(self) -> None:
        """Begin a micro-batch. Raises: see `check_for_stop`."""
        self.begin_piece() if self._sharded else self.check_for_stop()

    def begin_update(self) -> None:
        """Begin the reduction of an update's gradients. Raises: see `check_for_stop`."""
        if not self._sharded:
            self.begin_piece()


class Agreement:
    """One trainer's view of the decisions, which are numbered alike on every trainer.

    Decisions travel over the control store. A collective would not do: trainer 0 may need longer
    for a decision than a collective may last. A replica may be several decisions behind.
    """

    def __init__(self, control: Control, world: World, progress: Progress) -> None:
        self._control, self._world, self._progress = control, world, progress
        self._taken = 0
        """Decisions taken so far."""
        self._forgotten = 0
        """Decisions whose keys have been deleted."""

    def agree_on_choice(self, choice: int) -> int:
        """Return trainer 0's `choice` on every trainer."""
        self._taken += 1
        key = f"agreed/{self._taken}"
        if self._world.rank != 0:
            with self._progress.stage("wait straggler"):
                return int(self._control.wait_for(key, "trainer 0 to decide what all do next"))
        self._control.set(key, str(choice))
        return choice

    def forget_choices(self) -> None:
        """Delete the keys of all decisions so far. Call this after a collective: all have read the
        keys then."""
        for number in range(self._forgotten, self._taken) if self._world.rank == 0 else ():
            self._control.delete(f"agreed/{number + 1}")
        self._forgotten = self._taken
