"""A machine's time that is corrected in mid-run changes no duration of the record."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from digenrl.record.run_dir import append_event, unix_time
from digenrl.record.span_log import SpanLog
from digenrl.report.read_run import read_run
from digenrl.report.summary import wall_seconds


@pytest.mark.parametrize("step_s", [90_000.0, -90_000.0])
def test_a_stepped_clock_changes_no_duration(
    tmp_path: Path, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert abs(unix_time() - time.time()) < 60
    epoch = unix_time()
    append_event(tmp_path, "launch", {"world": {"trainer": 1}})
    read = time.time
    monkeypatch.setattr(time, "time", lambda: read() + step_s)
    log = SpanLog(tmp_path / "spans" / "rank-000.jsonl", 0, "trainer", epoch)
    with log.span("train", step=0):
        pass
    log.close()
    append_event(tmp_path, "end", {"status": "completed", "cause": None})
    (span,) = map(json.loads, (tmp_path / "spans" / "rank-000.jsonl").read_text().splitlines())
    assert 0 <= span["start"] < 60
    wall_s = wall_seconds(read_run(tmp_path))
    assert wall_s is not None
    assert 0 <= wall_s < 60
