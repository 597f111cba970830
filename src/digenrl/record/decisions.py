"""Log of one rank's scheduler: a JSON line per event and per decision."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from digenrl.record.line_file import LineFile

_NOTHING = (None, False, 0, "wait")
"""Decisions after which a rank goes on waiting."""
_COUNTED = ("step_ended",)
"""Questions that are asked once and change later decisions whatever the answer."""
_BLOCK = 100
"""Most lines that wait in memory."""


class DecisionLog:
    """Writer of the events and decisions of `digenrl.schedule.scheduler`, below its `header`: a
    fresh scheduler that is fed the events gives the decisions again.

    A waiting rank asks the same question many times a second. While the answer stays "nothing to
    do", it is written once. A rank's view of other ranks is written when a decision uses it. A
    decision depends on the newest view, and on every speed that was seen.

    Each decision follows from all before it, so a log with a gap cannot be replayed after the gap.
    Therefore the first `limit` bytes are kept whole, and a log ends where the disk refused a part
    of it.
    """

    def __init__(self, path: Path, header: dict[str, object], limit: float = math.inf) -> None:
        self._file, self._limit = LineFile(path), limit
        self._over = path.exists() and path.stat().st_size >= limit
        self._lines: list[bytes] = []
        self._add_row(header)
        self._flush_lines()  # a rank that is killed early leaves at least the header
        self._seen: dict[int, dict[str, Any]] = {}
        self._answers: dict[str, Any] = {}

    def __call__(self, row: dict[str, Any]) -> None:
        """Take one event or decision."""
        if row.get("event") == "saw_rank":
            rank = row["args"][0]
            if rank in self._seen and _task_seconds(self._seen[rank]) != _task_seconds(row):
                self._add_row(self._seen[rank])
            self._seen[rank] = row
            return
        if "decision" in row:
            name, answer = row["decision"], row["answer"]
            if (
                answer in _NOTHING
                and name not in _COUNTED
                and self._answers.get(name, ...) == answer
            ):
                return
            self._answers[name] = answer
        for each in (*self._seen.values(), row):
            self._add_row(each)
        self._seen.clear()

    def _add_row(self, row: dict[str, object]) -> None:
        if self._over:
            return
        self._lines.append(json.dumps(row, separators=(",", ":")).encode() + b"\n")
        if len(self._lines) >= _BLOCK:
            self._flush_lines()

    def _flush_lines(self) -> None:
        block, self._lines = b"".join(self._lines), []
        if block and (not self._file.write(block) or self._file.size >= self._limit):
            self._over = True

    def close(self) -> None:
        """Write the lines that are still in memory."""
        self._flush_lines()
        self._file.close()


def _task_seconds(row: Mapping[str, Any]) -> object:
    """Return the seconds of a task on a rank that was seen (`Work`); None for a lost
    rank."""
    work = row["args"][1]
    return None if work is None else work[1]
