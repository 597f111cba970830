"""Reads a run directory. Accepts what a crash leaves behind: a torn last line, missing files, lines written twice."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from digenrl.record.run_dir import EVENTS, LAUNCH, METRICS, SPANS, Row
from digenrl.record.spans import Span


class JsonlTail:
    """Reads a growing JSONL file piece by piece: each call of `read` returns the lines completed since the last one."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.damaged = 0
        """Lines so far that were no JSON object: torn by a crash."""
        self._offset = 0
        self._rest = b""

    def read(self) -> list[Row]:
        """New whole lines, oldest first; an absent file has none yet. A file that shrank is read from its beginning."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        return self._parse(lines)

    def finish(self) -> list[Row]:
        """What `read` would return if the file ended here: also a last line without its newline, when it is whole."""
        rows = self.read()
        rest, self._rest = self._rest, b""
        return rows + self._parse([rest])

    def _parse(self, lines: Sequence[bytes]) -> list[Row]:
        rows: list[Row] = []
        for line in lines:
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:  # includes UnicodeDecodeError: a multi-byte character cut in two
                row = None
            if isinstance(row, dict):
                rows.append(row)
            else:
                self.damaged += 1
        return rows


@dataclass(frozen=True)
class Run:
    """A run directory, read."""

    path: Path
    config: Row
    """config.yaml as plain data; {} when the run died before it was written."""
    steps: tuple[Row, ...]
    """Metric lines of kind "step" by rising rl_step; those that a resume repeated are replaced by the later ones."""
    evals: tuple[Row, ...]
    """Metric lines of kind "eval" by rising rl_step, replaced likewise."""
    events: tuple[Row, ...]
    """In the order of the file."""
    spans: tuple[Span, ...]
    """Of all ranks by start; seconds since the run's first start, also after a resume."""
    warnings: tuple[str, ...]
    """What could not be read, in words."""

    def column(self, key: str, kind: str = "step") -> tuple[list[int], list[float]]:
        """(rl_steps, values) of the lines that carry a number under `key`."""
        rows = self.steps if kind == "step" else self.evals
        pairs = [(int(row["rl_step"]), float(row[key])) for row in rows if is_number(row.get(key))]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def names(self, prefix: str) -> list[str]:
        """Sorted keys of the step lines that begin with `prefix` (for example "reward/")."""
        return sorted({key for row in self.steps for key in row if key.startswith(prefix)})

    def attempts(self) -> list[list[Row]]:
        """The events of each attempt. Trainers write start or resume; they open an attempt where no launcher did."""
        return split_attempts(self.events)

    def events_of(self, *kinds: str) -> list[Row]:
        """The events of the given kinds, in order."""
        return [event for event in self.events if event.get("kind") in kinds]


def split_attempts(events: Sequence[Row]) -> list[list[Row]]:
    """Cut events where an attempt begins: at each launch, or, where no launcher wrote, at each start or resume."""
    timed = [event for event in events if is_number(event.get("time"))]
    openers = (LAUNCH,) if any(event.get("kind") == LAUNCH for event in timed) else ("start", "resume")
    attempts: list[list[Row]] = []
    for event in timed:
        if event.get("kind") in openers or not attempts:
            attempts.append([])
        attempts[-1].append(event)
    return attempts


def is_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is a finite number (a boolean is none)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read everything that a run directory holds.

    Raises:
        FileNotFoundError: `path` is no directory, that of a plan, or holds neither config.yaml nor metrics.jsonl nor
            events.jsonl.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"run={path}: no such directory. Give one like run=outputs/<experiment>/<time>-<job>")
    if not any((path / name).exists() for name in ("config.yaml", METRICS, EVENTS)):
        inside = sorted(str(found.parent) for found in path.glob("**/config.yaml"))[-3:]
        nearest = f" Runs inside it: {', '.join(inside)}" if inside else ""
        raise FileNotFoundError(f"run={path}: not a run directory (no config.yaml, {METRICS} or {EVENTS}).{nearest}")
    warnings: list[str] = []
    config = _read_config(path / "config.yaml", warnings)
    if "plan" in config:
        raise FileNotFoundError(f"run={path}: is the directory of a plan; name that of a run (with make: RUN=...).")
    metrics = _read_jsonl(path / METRICS, warnings)
    events = _read_jsonl(path / EVENTS, warnings)
    spans: list[Span] = []
    starts = [float(attempt[0]["time"]) for attempt in split_attempts(events)]
    offsets = [start - starts[0] for start in starts] or [0.0]  # seconds from the first start to that of each attempt
    for file in sorted((path / SPANS).glob("rank-*.jsonl")):
        spans += _shift_attempts(_read_spans(file, warnings), offsets)
    steps, evals = _latest(metrics)
    return Run(
        path=path,
        config=config,
        steps=steps,
        evals=evals,
        events=tuple(events),
        spans=tuple(sorted(spans, key=lambda span: (span.start, span.rank))),
        warnings=tuple(warnings),
    )


def _read_config(path: Path, warnings: list[str]) -> Row:
    if not path.exists():
        warnings.append("config.yaml is missing")
        return {}
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        warnings.append(f"config.yaml cannot be read: {error}")
        return {}
    return config if isinstance(config, dict) else {}


def _read_jsonl(path: Path, warnings: list[str]) -> list[Row]:
    tail = JsonlTail(path)
    rows = tail.finish()
    if tail.damaged:
        warnings.append(f"{path.name}: {tail.damaged} damaged line(s) left out (a crash tears the line being written)")
    return rows


def _latest(metrics: Sequence[Row]) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """(step lines, eval lines), each by rising rl_step.

    A resumed run goes back to its checkpoint and writes some rl_steps again: a line takes the place of those of its
    kind from its rl_step on, and of later evaluations, which belonged to the abandoned attempt.
    """
    steps: list[Row] = []
    evals: list[Row] = []
    for row in metrics:
        if row.get("kind") not in ("step", "eval") or not is_number(row.get("rl_step")):
            continue
        append_step(steps if row["kind"] == "step" else evals, row)
        while evals and evals[-1]["rl_step"] > row["rl_step"]:
            evals.pop()
    return tuple(steps), tuple(evals)


def append_step(rows: list[Row], row: Row) -> None:
    """Append a metric line in place of those that a resumed run repeats: of its rl_step and later ones."""
    while rows and rows[-1]["rl_step"] >= row["rl_step"]:
        rows.pop()
    rows.append(row)


def _read_spans(path: Path, warnings: list[str]) -> list[Span]:
    spans: list[Span] = []
    refused: list[str] = []
    for row in _read_jsonl(path, warnings):
        try:
            spans.append(Span.from_dict(row))
        except (ValueError, TypeError) as error:
            refused.append(str(error))
    if refused:
        warnings.append(f"{path.name}: {len(refused)} span(s) left out, the first because: {refused[0]}")
    return spans


def _shift_attempts(spans: Sequence[Span], offsets: Sequence[float]) -> list[Span]:
    """Put the spans of resumed attempts, whose clock began again at zero, after those of the attempts before.

    A rank's lines are written as spans end, so an `end` that falls back by more than a second marks the next attempt.
    """
    attempt, previous = 0, -math.inf
    shifted: list[Span] = []
    for span in spans:
        if span.end < previous - 1.0 and attempt + 1 < len(offsets):
            attempt += 1
        previous = span.end
        offset = offsets[attempt]
        shifted.append(replace(span, start=span.start + offset, end=span.end + offset) if offset else span)
    return shifted
