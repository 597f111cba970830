"""Progress of this process, thread by thread, for its heartbeats.

The watcher of the heartbeats judges progress by its own clock (`digenrl.cluster.vitals`). Nothing
in this module waits or reads a clock.

A *stretch* is the time between two signs of progress of a thread: a stage begins, ends, or ticks.
Stages are those of `digenrl.record.spans`, marked by `SpanLog.span`. In a stage `wait ...` a thread
waits for others, so it is not to blame.

At the edges of stages a counter of the device's memory is read too (`Progress.gauge`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

WAIT = "wait"
OUTSIDE = ""
"""Stage of a thread outside of any stage."""
OTHER = "other"
"""Name in `Progress.peaks` of the time in which no thread is at work in a stage."""


@dataclass(frozen=True)
class Stretch:
    """Present stretch of one thread."""

    thread: str
    number: int
    """Number that counts up with every sign of progress."""
    stage: str
    known: bool
    """Whether the process has finished a stretch of the stage before."""

    @property
    def waits(self) -> bool:
        """Whether the thread waits for others."""
        return self.stage.split(" ")[0] == WAIT


class Progress:
    """Stages in progress in one process. The thread that creates it is always listed, others only
    while in a stage."""

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self._stages: dict[int, list[str]] = {self._main: []}
        self._now: dict[int, Stretch] = {self._main: Stretch("main", 0, OUTSIDE, known=False)}
        self._finished: set[str] = set()
        self._count = 0
        self.said = ""
        """Activity of the process in a few words, for the display."""
        self.gauge: Callable[[], int] | None = None
        """Returns the most bytes of the device since its last call; None on processors."""
        self.peaks: dict[str, int] = {}
        """Stage -> most bytes of the device during that stage, or OTHER; {} without a gauge."""
        self._measuring = threading.Lock()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Mark this thread as being in stage `name` during the body."""
        thread = threading.get_ident()
        self._measure_memory()
        stages = self._stages.setdefault(thread, [])
        stages.append(name)
        self._advance_stretch(thread)
        try:
            yield
        finally:
            self._measure_memory()
            stages.reverse()
            stages.remove(name)  # the innermost: two stages of a thread may overlap
            stages.reverse()
            self._advance_stretch(thread)

    def mark_progress(self) -> None:
        """Mark progress of this thread in its stage."""
        self._advance_stretch(threading.get_ident())

    def current_stretches(self) -> list[Stretch]:
        """Return the present stretch of each thread."""
        return list(self._now.values())

    def _measure_memory(self) -> None:
        """Count the memory since the last edge for every stage that is open in any thread."""
        if self.gauge is None:
            return
        with self._measuring:
            most = self.gauge()
            threads = [tuple(stages) for stages in tuple(self._stages.values())]
            names = {name.split(" ")[0] for stages in threads for name in stages} - {WAIT}
            for name in names or {OTHER}:
                self.peaks[name] = max(most, self.peaks.get(name, 0))

    def _advance_stretch(self, thread: int) -> None:
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
