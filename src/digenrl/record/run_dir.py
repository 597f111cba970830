"""What a run writes into its directory: names of files, events, JSON lines. `digenrl.report.read_run` reads it.

Writers append one JSON object per line with a single `write`, so several processes may share a file and a reader sees
whole lines.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from digenrl.record.redact import redact

Row = dict[str, Any]

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
SPANS = "spans"
DECISIONS = "decisions"
SAMPLES = "samples"
SUMMARY = "summary.json"
TRACE = "trace.json"
REPORT = "report.html"
PLOTS = "plots"
BEFORE_AFTER = "samples/before_after.png"

LAUNCH = "launch"
"""Kind of the event with which a launcher opens an attempt: the first, and each `make resume`; carries `world`."""
END = "end"
"""Kind of the event with which a launcher closes an attempt; carries `status` and `cause`."""
LOST = "lost"
"""Kind of the event with which a launcher notes a rank's death while the run continues; carries `rank` and `cause`."""


def json_safe(value: Any) -> Any:
    """`value` as JSON can hold it: NaN and infinities become null, 0-d tensors and numpy scalars plain numbers."""
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def append_jsonl(path: str | os.PathLike[str], row: Mapping[str, Any]) -> None:
    """Append `row` as one line, in one write. After a line that a crash tore, it still begins on a line of its own."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(json_safe(row), ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def append_event(run_dir: str | os.PathLike[str], kind: str, facts: Mapping[str, Any] | None = None) -> None:
    """Append {"time": Unix seconds, "kind": kind, **facts} to the run's events.jsonl, secrets masked: facts hold what
    errors said."""
    append_jsonl(Path(run_dir) / EVENTS, {"time": time.time(), "kind": kind, **redact(facts or {})})


def write_json(path: str | os.PathLike[str], value: Any, indent: int | None = 2) -> None:
    """Write `value` beside `path` and rename it over, so that no reader ever sees half a file."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(json_safe(value), indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)
