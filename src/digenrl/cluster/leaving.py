"""How a rank leaves a run that is over when its main thread cannot.

A main thread may be blocked in C for ever. A collective of NCCL waits for a peer that is gone.
Destroying a process group waits for peers that are in a collective. Neither wait looks at the
control store. A launcher kills such ranks. torchrun and SLURM do so for the ranks of one machine at
best. So each rank counts the seconds since the run was over, in its heartbeat thread, and ends its
own process.

    abort on the store, or no store  --abort_s + leave_s-->  stacks and cause on stderr, os._exit(1)
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from digenrl.cluster.control import Control
from digenrl.cluster.store import StoreLost
from digenrl.cluster.timers import BEAT_EVERY_S, ConditionTimer
from digenrl.cluster.world import Session, World
from digenrl.record.redact import redact_text

_LAST_WORDS_S = 10.0
"""Longest time for the last words: a full pipe or a file server that stalls must not keep the
process."""


class Leaving:
    """Ends this process when its run is over and the process does not leave by itself.

    Args:
        last_words: called with the cause before the exit, for what else must be said or written.
        more_s: seconds that this rank stays beyond the others. The host of the store stays longer,
            so that the others can say that they have left.
    """

    def __init__(
        self,
        session: Session,
        world: World,
        last_words: Callable[[str], None] = lambda cause: None,
        more_s: float = 0.0,
    ) -> None:
        self._session, self._world, self._last_words = session, world, last_words
        self._limit = session.limits.abort_s + session.limits.leave_s + more_s
        self._timer = ConditionTimer(2.0 * BEAT_EVERY_S)
        self._cause: str | None = None

    def leave_when_overdue(self, cause: str | None, control: Control | None = None) -> None:
        """Take notice that the run is over because of `cause` (None: it goes on), and leave if it
        has been over for too long. The first cause stays.

        Args:
            control: the store, where it still answers.
        """
        self._cause = self._cause or cause
        over_s = self._timer.observe(self._cause is not None)
        if self._cause is not None and over_s > self._limit and not self._session.over.is_set():
            self._leave_run(self._cause, control)

    def _leave_run(self, cause: str, control: Control | None) -> None:
        def report_last_words() -> None:
            rank, said = self._world.rank, self._session.progress.said
            faulthandler.dump_traceback(2)
            told = f"rank {rank} ({self._world.role}) is still in stage {said}, {self._limit:g} s "
            print(
                redact_text(f"{told}after the end of the run, and leaves: {cause}"),
                file=sys.stderr,
                flush=True,
            )
            if control is not None:
                with suppress(StoreLost):
                    control.set(f"left/{rank}", "1")
            self._last_words(cause)

        # In a thread, so that a print that blocks delays the exit and does not prevent it.
        speaker = threading.Thread(target=report_last_words, name="last-words", daemon=True)
        speaker.start()
        speaker.join(_LAST_WORDS_S)
        # No cleanup: the main thread is blocked in C and would not return.
        os._exit(1)
