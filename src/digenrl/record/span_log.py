"""Log of one rank's spans: a JSON line per span. A crash loses no more than a second.

Beyond the limit of its file a rank keeps the sums of its seconds, and writes them when it ends.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from digenrl.record.line_file import LineFile
from digenrl.record.progress import Progress
from digenrl.record.run_dir import unix_time

_BLOCK = 1000
"""Most lines that wait in memory."""
LEFT_OUT = "left_out"
"""Key of the line with the sums of the spans beyond the limit: {"stage cause": seconds}."""
Took = Callable[[float], None]
"""Takes the seconds of a span."""


class SpanLog:
    """Spans of one rank, in seconds since the run started.

    Args:
        path: JSON-lines file, created with its directory; None keeps spans in memory only.
        epoch: wall-clock second that the launcher calls zero. Durations use the monotonic clock
            only.
        progress: object in which stages in progress are marked.
        limit: bytes of the file from which on spans are only summed.
        mark: marks the end of the work given to the device so far, as
            `digenrl.accelerator.mark_work`.
    """

    def __init__(
        self,
        path: Path | None,
        rank: int,
        role: str,
        epoch: float,
        progress: Progress | None = None,
        limit: float = math.inf,
        mark: Callable[[], object] = lambda: None,
    ) -> None:
        self.rank, self.role, self.progress = rank, role, progress or Progress()
        self._offset = unix_time() - epoch - time.monotonic()
        self._file = None if path is None else LineFile(path)
        self._limit, self._left_out = limit, defaultdict[str, float](float)
        self._lines: list[bytes] = []
        self._flushed = 0.0
        self._lock = threading.Lock()
        self._given, self._device_end, self._mark = deque[tuple[Any, ...]](), 0.0, mark
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        """(stage, cause) -> seconds since the last `take_seconds`."""

    def now(self) -> float:
        """Return the seconds since the run started."""
        return time.monotonic() + self._offset

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Mark the rank as being in stage `name` during the body, as `span` does, but without a
        record."""
        self.progress.said = name
        with self.progress.stage(name):
            yield

    @contextmanager
    def span(
        self, stage: str, quiet: bool = False, took: Took | None = None, **args: Any
    ) -> Iterator[dict[str, object]]:
        """Record the body as one span. The yielded dict takes facts that are known only inside.

        `quiet` spans of other threads do not change the rank's activity in the display. A span with
        `took` lasts until the device has done what the body gives it. Nobody waits for that: the
        span is recorded, and `took` is given its seconds, when the work is found done.
        """
        start, before = self.now(), self._mark() if took else None
        name = " ".join([stage, *(args[key] for key in ("cause", "what") if key in args)])
        where = next((f" {key[0]}{args[key]}" for key in ("group", "version") if key in args), "")
        if not quiet:
            self.progress.said = f"{name}{where}"
        try:
            with self.progress.stage(name):
                yield args
        finally:
            if took is None:
                self.add_span(stage, start, self.now(), quiet, **args)
            else:
                self._given.append((stage, start, self.now(), before, self._mark(), took, args))
                self.record_finished()

    def record_finished(self, wait: bool = False) -> None:
        """Record the spans whose work the device has done; with `wait`, all of them."""
        while self._given and (wait or not (done := self._given[0][4]) or done.query()):
            stage, start, end, before, after, took, args = self._given.popleft()
            if before and after:
                after.synchronize()
                start = max(start, self._device_end)
                end = self._device_end = start + 1e-3 * before.elapsed_time(after)
            self.add_span(stage, start, end, quiet=True, **args)
            took(end - start)

    def add_span(
        self, stage: str, start: float, end: float, quiet: bool = False, **args: object
    ) -> None:
        """Record a span that was measured elsewhere. Unless it is `quiet`, it begins when the
        device has done what was given before: a rank whose device works does not wait."""
        if not quiet:
            self.record_finished()
            start = end if self._given else min(end, max(start, self._device_end))
        row = {
            "rank": self.rank,
            "role": self.role,
            "stage": stage,
            "start": round(start, 6),
            "end": round(end, 6),
        }
        with self._lock:
            self.seconds[stage, str(args.get("cause", ""))] += end - start
            if self._file is None:
                return
            if self._file.size > self._limit:
                label = f"{stage} {args['cause']}" if "cause" in args else stage
                self._left_out[label] += end - start
                return
            self._lines.append(_json_line(row | args))
            if end - self._flushed > 1.0 or len(self._lines) >= _BLOCK:
                self._flush_lines(self._file)
                self._flushed = end

    def _flush_lines(self, file: LineFile) -> None:
        block, self._lines = b"".join(self._lines), []
        if block:
            file.write(block)

    def take_seconds(self) -> dict[tuple[str, str], float]:
        """Return the seconds by (stage, cause) since the last call."""
        with self._lock:
            taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken

    def close(self, wait: bool = True) -> None:
        """Write what is left. Without `wait`, spans whose work the device has not done are dropped:
        after a failure that work may be a collective without an end."""
        if wait:
            self.record_finished(wait=True)
        with self._lock:
            if self._file is not None:
                if self._left_out:
                    self._lines.append(
                        _json_line({LEFT_OUT: self._left_out, "rank": self.rank, "role": self.role})
                    )
                self._flush_lines(self._file)
                self._file.close()
                self._file = None


def _json_line(row: dict[str, object]) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"
