"""Spans: the time that every rank spent in each stage. Runtime and simulator write equal records,
which reports read.

A span file has one JSON object per line: {"rank", "role", "stage", "start", "end", "step",
...args}, seconds since the start of the run. `trace.json` is the Chrome / Perfetto event format.
Pure: standard library only, no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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

WAIT_CAUSES = ("first_fragment", "weights", "tail", "reward", "straggler", "startup", "evaluation")
"""Values of a `wait` span's `cause`: why a rank waited."""

ROLES = ("launcher", "rollout", "trainer")
"""Every role that a span may name. A role's index is the process number in `trace.json`."""

_LATEST_S, _LARGEST = 1e10, 2**53
_FIELDS = {"rank": int, "role": str, "stage": str, "start": float, "end": float, "step": int}


@dataclass(frozen=True)
class Span:
    """An interval of a rank's time in one stage."""

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
    """Further facts (cause of a wait, group, task, version), as JSON values."""

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ValueError(f"span stage = {self.stage!r}: use one of {', '.join(STAGES)}.")
        if self.end < self.start:
            raise ValueError(
                f"span {self.stage} of rank {self.rank} ends at {self.end} before its start "
                f"{self.start}."
            )
        if self.stage == "wait" and self.args.get("cause") not in WAIT_CAUSES:
            raise ValueError(
                f"wait cause = {self.args.get('cause')!r}: use one of {', '.join(WAIT_CAUSES)}."
            )
        clash = sorted(set(self.args) & set(_FIELDS))
        if clash:
            raise ValueError(
                f"span args {clash} would overwrite the span's own fields: rename them."
            )

    @property
    def seconds(self) -> float:
        """Length of the span."""
        return self.end - self.start

    def to_dict(self) -> dict[str, object]:
        """Return the JSON object of a span file: the fields, then the args, flat.

        Example:
            >>> row = Span(2, "rollout", "decode", 1.0, 3.0, 0, {"group": 1}).to_dict()
            >>> list(row.items())[2:]
            [('stage', 'decode'), ('start', 1.0), ('end', 3.0), ('step', 0), ('group', 1)]
        """
        return {**{name: getattr(self, name) for name in _FIELDS}, **self.args}

    @classmethod
    def from_dict(cls, record: Mapping[str, object]) -> Span:
        """Return the span of a JSON object, as the inverse of `to_dict`. A missing step is -1.

        Raises:
            ValueError: another field is missing, or a field has a value that no rank writes.
            TypeError, OverflowError: a field is no number.
        """
        missing = [name for name in _FIELDS if name not in record and name != "step"]
        if missing:
            raise ValueError(f"span record lacks {', '.join(missing)}: {dict(record)}.")
        args = {key: value for key, value in record.items() if key not in _FIELDS}
        span = cls(
            **{name: kind(record.get(name, -1)) for name, kind in _FIELDS.items()}, args=args
        )
        if span.role not in ROLES:
            raise ValueError(f"span role = {span.role!r}: use one of {', '.join(ROLES)}.")
        if (
            not -_LATEST_S <= span.start <= span.end <= _LATEST_S
            or not -1 <= span.step <= _LARGEST >= span.rank >= 0
        ):
            raise ValueError(
                f"a span of rank {span.rank}, step {span.step} from {span.start} to {span.end} s "
                "is absurd."
            )
        return span


def perfetto_events(spans: Iterable[Span]) -> Iterator[dict[str, object]]:
    """Yield Chrome trace events for ui.perfetto.dev: one process per role, one thread per rank,
    microseconds.

    Format: "Trace Event Format", complete events (`ph: X`) and metadata events (`ph: M`), in any
    order.
    """
    known: set[tuple[str, int]] = set()
    for pid, role in enumerate(ROLES):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": role}}
    for span in spans:
        pid = ROLES.index(span.role)
        if (span.role, span.rank) not in known:
            known.add((span.role, span.rank))
            name = {"name": f"{span.role} {span.rank}"}
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": span.rank, "args": name}
        cause = span.args.get("cause")
        yield {
            "ph": "X",
            "name": f"wait: {cause}" if cause else span.stage,
            "cat": span.stage,
            "pid": pid,
            "tid": span.rank,
            "ts": round(span.start * 1e6, 3),
            "dur": round(span.seconds * 1e6, 3),
            "args": {"step": span.step, **span.args},
        }
