"""What this rank's policy saw and decided: one JSON line per event and decision, in a file of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_NOTHING = (None, False, 0, "wait")
"""Answers with which a rank goes on waiting."""


class DecisionLog:
    """Writes what `digenrl.schedule.policy` records, below its `header`; `policy.replay` gives every decision again.

    A rank that waits asks the same question many times a second. While the answer stays "nothing to do", it is the same
    decision still standing, and is written once. What a rank sees of others is written when something is decided with
    it: a decision depends on the newest view alone.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._file.write(json.dumps(header) + "\n")
        self._seen: dict[int, dict[str, Any]] = {}
        self._answers: dict[str, Any] = {}

    def __call__(self, row: dict[str, Any]) -> None:
        """Take one event or decision."""
        if row.get("event") == "saw_rank":
            self._seen[row["args"][0]] = row
            return
        if "decision" in row:
            name, answer = row["decision"], row["answer"]
            if answer in _NOTHING and name in self._answers and self._answers[name] == answer:
                return
            self._answers[name] = answer
        for each in (*self._seen.values(), row):
            self._file.write(json.dumps(each, separators=(",", ":")) + "\n")
        self._seen.clear()

    def close(self) -> None:
        """Write what is still in memory."""
        self._file.close()
