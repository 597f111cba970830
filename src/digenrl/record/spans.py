"""Spans: what every rank did when. Runtime and simulator write the same records, reports read only these.

A span file has one JSON object per line: {"rank", "role", "stage", "start", "end", "step", ...args}, seconds since the
start of the run. `trace.json` is the Chrome / Perfetto event format.
Pure: standard library only, no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

STAGES = (
    "encode",
    "generate",
    "decode",
    "score",
    "send",
    "wait",
    "train",
    "optimizer",
    "publish",
    "adopt",
    "lend",
    "eval",
)
"""Every stage that a span may name."""

WAIT_CAUSES = ("first_fragment", "weights", "tail", "reward", "straggler", "startup")
"""Why a rank waited. A `wait` span carries one of them as `cause`."""

_FIELDS = {"rank": int, "role": str, "stage": str, "start": float, "end": float, "step": int}


@dataclass(frozen=True)
class Span:
    """One stretch of one rank's time."""

    rank: int
    """Launch rank."""
    role: str
    """trainer | rollout | launcher."""
    stage: str
    """One of STAGES."""
    start: float
    """Seconds since the start of the run."""
    end: float
    step: int
    """RL step that the work belongs to; -1 outside any."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Everything else (cause of a wait, group, task, version); JSON values only."""

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ValueError(f"span stage = {self.stage!r}: use one of {', '.join(STAGES)}.")
        if self.end < self.start:
            raise ValueError(f"span {self.stage} of rank {self.rank} ends at {self.end} before its start {self.start}.")
        if self.stage == "wait" and self.args.get("cause") not in WAIT_CAUSES:
            raise ValueError(f"wait cause = {self.args.get('cause')!r}: use one of {', '.join(WAIT_CAUSES)}.")
        clash = sorted(set(self.args) & set(_FIELDS))
        if clash:
            raise ValueError(f"span args {clash} would overwrite the span's own fields: rename them.")

    @property
    def seconds(self) -> float:
        """Length of the span."""
        return self.end - self.start

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of a span file: the fields, then the args, flat."""
        return {**{name: getattr(self, name) for name in _FIELDS}, **self.args}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Span:
        """Inverse of `to_dict`; a missing step is -1. Raises ValueError naming any other field that is missing."""
        missing = [name for name in _FIELDS if name not in record and name != "step"]
        if missing:
            raise ValueError(f"span record lacks {', '.join(missing)}: {dict(record)}.")
        args = {key: value for key, value in record.items() if key not in _FIELDS}
        return cls(**{name: kind(record.get(name, -1)) for name, kind in _FIELDS.items()}, args=args)


def perfetto(spans: Iterable[Span]) -> dict[str, Any]:
    """Chrome trace-event JSON (opens in ui.perfetto.dev): one process per role, one thread per rank, microseconds.

    Format: "Trace Event Format", complete events (`ph: X`) and metadata events (`ph: M`).
    """
    ordered = sorted(spans, key=lambda span: (span.start, span.rank))
    roles = {role: number for number, role in enumerate(sorted({span.role for span in ordered}))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": role}} for role, pid in roles.items()
    ]
    for role, rank in sorted({(span.role, span.rank) for span in ordered}):
        name = {"name": f"{role} {rank}"}
        events.append({"ph": "M", "name": "thread_name", "pid": roles[role], "tid": rank, "args": name})
    for span in ordered:
        cause = span.args.get("cause")
        events.append(
            {
                "ph": "X",
                "name": f"wait: {cause}" if cause else span.stage,
                "cat": span.stage,
                "pid": roles[span.role],
                "tid": span.rank,
                "ts": round(span.start * 1e6, 3),
                "dur": round(span.seconds * 1e6, 3),
                "args": {"step": span.step, **span.args},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def bubbles(spans: Iterable[Span]) -> dict[str, dict[str, float]]:
    """Seconds waited, role -> cause -> seconds summed over ranks. Roles without a wait are absent."""
    return _totals((span.role, span.args["cause"], span.seconds) for span in spans if span.stage == "wait")


def busy(spans: Iterable[Span]) -> dict[str, dict[str, float]]:
    """Seconds worked, role -> stage -> seconds summed over ranks (waits excluded)."""
    return _totals((span.role, span.stage, span.seconds) for span in spans if span.stage != "wait")


def _totals(parts: Iterable[tuple[str, str, float]]) -> dict[str, dict[str, float]]:
    """role -> name -> sum of the seconds."""
    table: dict[str, dict[str, float]] = {}
    for role, name, seconds in parts:
        row = table.setdefault(role, {})
        row[name] = row.get(name, 0.0) + seconds
    return table


def clipped(spans: Iterable[Span], start: float, end: float) -> list[Span]:
    """The parts of `spans` inside [start, end]: what one RL step or one window of a run cost."""
    parts = []
    for span in spans:
        first, last = max(span.start, start), min(span.end, end)
        if last > first:
            parts.append(Span(span.rank, span.role, span.stage, first, last, span.step, span.args))
    return parts
