"""What this process does at the moment, thread by thread. Heartbeats carry it, and the watcher of the heartbeats judges
it by its own clock (`digenrl.cluster.vitals`): nothing here waits, and nothing here knows the time.

A *stretch* is what lies between two signs of progress of a thread: a stage begins, ends, or ticks. Stages are those of
`digenrl.record.spans`, marked by `SpanLog.span`; a stage `wait ...` waits for others and is nobody's fault.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

WAIT = "wait"
OUTSIDE = ""
"""The stage of a thread that is in none."""


@dataclass(frozen=True)
class Stretch:
    """What one thread does at the moment."""

    thread: str
    number: int
    """Counts up with every sign of progress."""
    stage: str
    known: bool
    """This process has finished a stretch of the stage before."""

    @property
    def waits(self) -> bool:
        """Whether it is somebody else's turn."""
        return self.stage.split(" ")[0] == WAIT


class Progress:
    """The stages in progress of one process. The thread that makes it is always listed, others while in a stage."""

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self._stages: dict[int, list[str]] = {self._main: []}
        self._now: dict[int, Stretch] = {self._main: Stretch("main", 0, OUTSIDE, known=False)}
        self._finished: set[str] = set()
        self._count = 0
        self.said = ""
        """What the process does, in a few words, for the live display."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Inside, this thread is in stage `name`."""
        thread = threading.get_ident()
        stages = self._stages.setdefault(thread, [])
        stages.append(name)
        self._advance(thread)
        try:
            yield
        finally:
            stages.reverse()
            stages.remove(name)  # the innermost: two stages of a thread may overlap
            stages.reverse()
            self._advance(thread)

    def tick(self) -> None:
        """The stage of this thread has got on."""
        self._advance(threading.get_ident())

    def now(self) -> list[Stretch]:
        """What each thread does."""
        return list(self._now.values())

    def _advance(self, thread: int) -> None:
        before, stages = self._now.get(thread), self._stages[thread]
        if before is not None and before.stage != OUTSIDE:
            self._finished.add(before.stage)
        if not stages and thread != self._main:
            del self._now[thread], self._stages[thread]
            return
        self._count += 1
        stage = stages[-1] if stages else OUTSIDE
        name = "main" if thread == self._main else threading.current_thread().name
        self._now[thread] = Stretch(name, self._count, stage, known=stage in self._finished)
