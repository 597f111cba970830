"""The log of decisions keeps its beginning, so that it can be replayed."""

from __future__ import annotations

import json
from pathlib import Path

from digenrl.record.decisions import DecisionLog

LIMIT = 64 << 10


def test_decisions_keep_their_beginning(tmp_path: Path) -> None:
    path = tmp_path / "decisions" / "rank-000.jsonl"
    for attempt in range(2):  # a resumed run adds nothing to a record that has reached its limit
        log = DecisionLog(path, {"spec": {}, "attempt": attempt}, LIMIT)
        for number in range(5000):
            log({"event": "busy", "args": [number]})
        log.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.stat().st_size < 1.1 * LIMIT
    assert rows[0]["attempt"] == 0
    assert [row["args"][0] for row in rows[1:]] == list(range(len(rows) - 1))


def test_an_answer_of_nothing_is_written_once(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "rank-000.jsonl", {"spec": {}})
    for answer in ("wait", "wait", 3, 3, "wait", "wait"):
        log({"decision": "next", "answer": answer})
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "rank-000.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in rows[1:]] == ["wait", 3, 3, "wait"]
