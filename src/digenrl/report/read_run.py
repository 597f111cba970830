"""Read a run directory, also after a crash: with a torn last line, missing files, or lines written
twice.

Nothing in the directory is trusted. A line is left out if it is no JSON object, or if a known field
has another type or an absurd value. Lines that are left out are counted, and reported with their
file and number. Spans are read line by line each time they are needed.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeGuard

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from digenrl.record.run_dir import EVENTS, LAUNCH, METRICS, SPANS, Row, event_files
from digenrl.record.span_log import LEFT_OUT
from digenrl.record.spans import STAGES, WAIT_CAUSES, Span
from digenrl.record.stored_yaml import read_plain
from digenrl.report.find import files_of, open_own

_LONGEST = 1 << 20
"""Most bytes of a line that is read."""
_LARGEST = 1e300
"""Largest number that is read. Sums and axes of larger numbers overflow."""

_Second = Annotated[float, Field(ge=0, le=2.5e11)]  # until the year 9892, which a calendar can show
_Count = Annotated[int, Field(ge=0, le=2**53)]
_Digits = Annotated[str, Field(pattern=r"^\d{1,9}$")]


class _Row(BaseModel):
    """Fields of a line that are read by name; other keys are free. `time` is null if no clock was
    read."""

    model_config = ConfigDict(extra="allow", strict=True)
    kind: str = ""
    time: _Second | None = None


class _Metric(_Row):
    """A line of metrics.jsonl."""

    rl_step: _Count = 0
    peak_gib: dict[_Digits, dict[str, _Second]] | None = None


class _Event(_Row):
    """A line of events.jsonl."""

    status: str = ""
    cause: str | None = None
    message: str = ""
    rl_step: _Count | Annotated[float, Field(ge=0, le=2**53)] = 0
    samples: _Count = 0
    lines: _Count = 0
    failures: _Count = 0
    file: str = ""
    logger: str = ""
    reward: str = ""
    reason: str = ""
    world: dict[str, _Count] = {}
    identities: dict[str, dict[str, Any] | None] = {}
    expected: dict[str, dict[str, _Second]] = {}


@dataclass
class Refused:
    """Lines of one file that are left out. Grows while the file is read, hence not frozen."""

    count: int = 0
    first: str = ""
    """Line number and fault of the first malformed line."""

    def add_line(self, line: int, why: str) -> None:
        self.count += 1
        self.first = self.first or f"line {line}: {' '.join(why.split())[:200]}"

    def add_warning(self, path: Path, warnings: list[str]) -> None:
        """Add a warning if lines were left out."""
        if self.count:
            warnings.append(
                f"{path.name}: {self.count} damaged line(s) left out; the first is {self.first}"
            )


def parse_row(line: bytes) -> Row:
    """Return the JSON object of a line. Its keys share memory with those of other lines.

    Raises:
        ValueError: the line holds no object.
    """
    try:
        row = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(row, dict):
        raise ValueError("no JSON object")
    return {sys.intern(key): value for key, value in row.items()}


def lines_of(path: Path, refused: Refused) -> Iterator[tuple[int, Row]]:
    """Yield (number, object) of every line that holds an object; nothing for a file that cannot be
    read."""
    try:
        file = open_own(path)
    except FileNotFoundError:
        return
    except OSError as error:
        refused.add_line(0, error.strerror or str(error))
        return
    with file:
        number, inside = 0, False
        while line := file.readline(_LONGEST):
            number += not inside
            cut = not line.endswith(b"\n") and len(line) == _LONGEST
            if inside or cut:
                if not inside:
                    refused.add_line(number, f"longer than {_LONGEST} bytes")
                inside = cut
                continue
            if not line.strip():
                continue
            try:
                yield number, parse_row(line)
            except (
                ValueError
            ) as error:  # includes UnicodeDecodeError: a multi-byte character cut in two
                refused.add_line(number, str(error))


class JsonlTail:
    """Reader of a growing JSONL file. Each call of `read_new_rows` returns the lines completed
    since the last call."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._reset_offset()

    def _reset_offset(self) -> None:
        # Bytes read, the line that is not complete yet, and whether that line is too long.
        self._offset, self._rest, self._inside = 0, b"", False

    def read_new_rows(self) -> list[Row]:
        """Return new whole lines, oldest first; none for an absent or unreadable file. A file
        that shrank is read from its beginning. Lines that are torn or too long are left out."""
        rows: list[Row] = []
        with suppress(OSError), open_own(self.path) as file:  # absent, or no file that may be read
            if os.fstat(file.fileno()).st_size < self._offset:
                self._reset_offset()
            file.seek(self._offset)
            while piece := file.readline(_LONGEST):
                self._offset += len(piece)
                line, ends = self._rest + piece, piece.endswith(b"\n")
                too_long = self._inside or len(line) > _LONGEST
                self._inside = too_long and not ends
                self._rest = b"" if ends or too_long else line
                if ends and not too_long:
                    with suppress(ValueError):  # a crash tore it, or it is empty
                        rows.append(parse_row(line))
        return rows


@dataclass(frozen=True)
class SpanFiles:
    """Spans of all ranks, rank by rank in the order of their ends.

    They are read from their files at each iteration. Seconds count from the run's first start, also
    after a resume.
    """

    files: tuple[Path, ...]
    offsets: tuple[float, ...]
    """Seconds from the first start to the start of each attempt."""

    def __iter__(self) -> Iterator[Span]:
        for file in self.files:
            yield from _read_spans(file, self.offsets, Refused(), [])


@dataclass(frozen=True)
class Run:
    """Contents of a run directory."""

    path: Path
    config: Row
    """config.yaml as plain data; {} if the run died before writing it."""
    steps: tuple[Row, ...]
    """Metric lines of kind "step" by rising rl_step. Lines that a resume repeated are replaced by
    the later ones."""
    evals: tuple[Row, ...]
    """Metric lines of kind "eval" by rising rl_step, replaced likewise."""
    events: tuple[Row, ...]
    """Events in the order of the file."""
    spans: Iterable[Span]
    """Spans of all ranks, in no order, for any number of iterations. The record of a long run lacks
    steps."""
    seconds: Mapping[tuple[str, int], Mapping[str, float]]
    """(role, rank) -> stage or "wait <cause>" -> seconds, also of steps that the record lacks."""
    step_ends: Mapping[int, float]
    """RL step -> second at which the last trainer finished it, for the steps in `spans`."""
    warnings: tuple[str, ...]
    """Sentences about lines and files that could not be read."""

    @property
    def staleness_allowed(self) -> int:
        """Versions by which `schedule.async_steps` lets the weights of a trained sample lag: 0 or
        1."""
        schedule = self.config.get("schedule")
        return int(isinstance(schedule, Mapping) and schedule.get("async_steps", 0) != 0)

    def column(self, key: str, kind: str = "step") -> tuple[list[int], list[float]]:
        """Return (rl_steps, values) of the lines that carry a number under `key`."""
        rows = self.steps if kind == "step" else self.evals
        pairs = [(int(row["rl_step"]), float(row[key])) for row in rows if is_number(row.get(key))]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def metric_names(self, prefix: str) -> list[str]:
        """Sorted keys of the step lines that begin with `prefix` (for example "reward/")."""
        return sorted({key for row in self.steps for key in row if key.startswith(prefix)})

    def attempt_events(self) -> list[list[Row]]:
        """Return the events of each attempt. A trainer's start or resume opens an attempt if no
        launcher did."""
        return split_attempts(self.events)

    def events_of(self, *kinds: str) -> list[Row]:
        """Return the events of the given kinds, in order."""
        return [event for event in self.events if event.get("kind") in kinds]


def split_attempts(events: Sequence[Row]) -> list[list[Row]]:
    """Cut events where an attempt begins: at each launch, or at each start or resume if no launcher
    wrote."""
    timed = [event for event in events if is_number(event.get("time"))]
    openers = (
        (LAUNCH,) if any(event.get("kind") == LAUNCH for event in timed) else ("start", "resume")
    )
    attempts: list[list[Row]] = []
    for event in timed:
        if event.get("kind") in openers or not attempts:
            attempts.append([])
        attempts[-1].append(event)
    return attempts


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a finite number. A boolean is no number."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and -_LARGEST < value < _LARGEST
    )


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read everything that a run directory holds.

    Raises:
        FileNotFoundError: `path` is no directory, is the directory of a plan, or holds none of
            config.yaml, metrics.jsonl and events.jsonl.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(
            f"run={path}: no such directory. Give one like run=outputs/<experiment>/<time>-<job>"
        )
    if not any((path / name).exists() for name in ("config.yaml", METRICS, EVENTS)):
        inside = sorted(str(found.parent) for found in path.glob("**/config.yaml"))[-3:]
        nearest = f" Runs inside it: {', '.join(inside)}" if inside else ""
        raise FileNotFoundError(
            f"run={path}: not a run directory (no config.yaml, {METRICS} or {EVENTS}).{nearest}"
        )
    warnings: list[str] = []
    config = _read_config(path / "config.yaml", warnings)
    if "plan" in config:
        raise FileNotFoundError(
            f"run={path}: is the directory of a plan; name that of a run (with make: RUN=...)."
        )
    steps, evals = _latest_rows(_valid_rows(path / METRICS, _Metric, warnings))
    files = [tuple(_valid_rows(file, _Event, warnings)) for file in event_files(path)]
    events = files[0]
    if len(files) > 1:  # of several machines
        events = tuple(sorted(itertools.chain(*files), key=_time_of))
    starts = [float(attempt[0]["time"]) for attempt in split_attempts(events)]
    offsets = tuple(start - starts[0] for start in starts) or (0.0,)
    spans = SpanFiles(tuple(files_of(path, SPANS, "rank-*.jsonl")), offsets)
    seconds, ends = _sum_spans(spans, warnings)
    return Run(path, config, steps, evals, events, spans, seconds, ends, tuple(warnings))


def _read_config(path: Path, warnings: list[str]) -> Row:
    if not path.exists():
        warnings.append("config.yaml is missing")
        return {}
    try:
        if path.is_symlink():
            raise OSError("is a link, which is not followed")
        config = read_plain(path)
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        warnings.append(f"config.yaml cannot be read: {error}")
        return {}
    if not isinstance(config, dict):
        warnings.append("config.yaml is no mapping")
        return {}
    return config


def _valid_rows(path: Path, fields: type[_Row], warnings: list[str]) -> Iterator[Row]:
    """Yield the rows of a file whose known fields are valid."""
    refused = Refused()
    for number, row in lines_of(path, refused):
        try:
            fields.model_validate(row)
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            refused.add_line(
                number, f"{wrong['loc'][0]} = {str(wrong['input'])[:40]!r}: {wrong['msg']}"
            )
        else:
            yield row
    refused.add_warning(path, warnings)


def _time_of(row: Row) -> float:
    return float(row["time"]) if is_number(row.get("time")) else 0.0


def _latest_rows(metrics: Iterable[Row]) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Return (step lines, eval lines), each by rising rl_step.

    A resumed run goes back to its checkpoint and writes some rl_steps again. Such a line replaces
    the lines of its kind from its rl_step on. It also replaces later evaluations, which belonged to
    the abandoned attempt.
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
    """Append a metric line after removing lines of its rl_step and later ones, which a resumed run
    repeats."""
    while rows and rows[-1]["rl_step"] >= row["rl_step"]:
        rows.pop()
    rows.append(row)


def _sum_spans(
    spans: SpanFiles, warnings: list[str]
) -> tuple[Mapping[tuple[str, int], Mapping[str, float]], Mapping[int, float]]:
    """Read every span once; return `Run.seconds` and `Run.step_ends`. Add warnings about lines that
    had to be left out."""
    seconds = defaultdict[tuple[str, int], defaultdict[str, float]](lambda: defaultdict(float))
    ends = dict[int, float]()
    for file in spans.files:
        refused, left_out = Refused(), list[tuple[tuple[str, int], Row]]()
        for span in _read_spans(file, spans.offsets, refused, left_out):
            seconds[span.role, span.rank][label_of(span)] += span.seconds
            if extends_step(span):
                ends[span.step] = max(ends.get(span.step, 0.0), span.end)
        for place, sums in left_out:
            for label, spent in sums.items():
                seconds[place][label] += spent
        refused.add_warning(file, warnings)
    return seconds, ends


def label_of(span: Span) -> str:
    """Return the label under which a span's seconds are counted: its stage, or "wait <cause>"."""
    return f"wait {span.args['cause']}" if span.stage == "wait" else span.stage


def extends_step(span: Span) -> bool:
    """Return whether a trainer's part of an RL step lasts at least until this span's end."""
    return (
        span.role == "trainer"
        and span.step >= 0
        and span.stage not in ("generate", "lend", "send", "eval")
    )


_LABELS = {*STAGES, *(f"wait {cause}" for cause in WAIT_CAUSES)} - {"wait"}


def _read_spans(
    path: Path,
    offsets: Sequence[float],
    refused: Refused,
    left_out: list[tuple[tuple[str, int], Row]],
) -> Iterator[Span]:
    """Yield the spans of one rank, attempt by attempt, with seconds from the run's first start.

    The clock of each attempt begins at zero. Lines are written as spans end, so an `end` that falls
    back by more than a second marks the next attempt. `left_out` takes the seconds of spans that
    the record lacks.
    """
    attempt, previous = 0, 0.0
    for number, row in lines_of(path, refused):
        try:
            if LEFT_OUT in row:
                seconds = row[LEFT_OUT]
                if not seconds.keys() <= _LABELS or not all(
                    is_number(spent) for spent in seconds.values()
                ):
                    raise ValueError(f"{LEFT_OUT} = {seconds}: use seconds by stage")
                left_out.append(((str(row["role"]), int(row["rank"])), seconds))
                continue
            span = Span.from_dict(row)
        except (ValueError, TypeError, OverflowError, AttributeError, KeyError) as error:
            refused.add_line(number, f"{type(error).__name__}: {error}")
            continue
        if span.end < previous - 1.0 and attempt + 1 < len(offsets):
            attempt += 1
        previous = span.end
        if offset := offsets[attempt]:
            span = replace(span, start=span.start + offset, end=span.end + offset)
        yield span
