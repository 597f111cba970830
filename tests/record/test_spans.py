"""Spans: one format for runtime and simulator."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from digenrl.record.run_dir import unix_time
from digenrl.record.span_log import SpanLog
from digenrl.record.spans import Span, perfetto_events

SPANS = [
    Span(0, "trainer", "train", 1.0, 3.0, 0, {"groups": [0]}),
    Span(0, "trainer", "wait", 3.0, 4.5, 0, {"cause": "tail"}),
    Span(1, "rollout", "generate", 0.0, 2.0, 0),
    Span(2, "rollout", "wait", 0.0, 1.0, 0, {"cause": "weights"}),
]


def test_a_span_survives_json() -> None:
    for span in SPANS:
        assert Span.from_dict(json.loads(json.dumps(span.to_dict()))) == span


def test_perfetto_events_are_complete_and_in_microseconds() -> None:
    events = list(perfetto_events(SPANS))
    bars = [event for event in events if event["ph"] == "X"]
    assert {(event["tid"], event["ts"], event["dur"]) for event in bars} >= {
        (0, 1e6, 2e6),
        (2, 0.0, 1e6),
    }
    kind = {"ph": "M", "name": "process_name", "tid": 0}
    assert events[:3] == [
        kind | {"pid": pid, "args": {"name": role}}
        for pid, role in enumerate(("launcher", "rollout", "trainer"))
    ]
    named = [event for event in events[3:] if event["ph"] == "M"]
    assert named == [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": rank, "args": {"name": name}}
        for pid, rank, name in ((2, 0, "trainer 0"), (1, 1, "rollout 1"), (1, 2, "rollout 2"))
    ]
    assert bars[:2] == [
        {"ph": "X", "name": "train", "cat": "train", "pid": 2, "tid": 0, "ts": 1e6, "dur": 2e6,
         "args": {"step": 0, "groups": [0]}},
        {"ph": "X", "name": "wait: tail", "cat": "wait", "pid": 2, "tid": 0, "ts": 3e6,
         "dur": 1.5e6, "args": {"step": 0, "cause": "tail"}},
    ]  # fmt: skip
    fine = Span(0, "trainer", "train", 1.23456789e-3, 3.58025567e-3, 0)
    (odd,) = [event for event in perfetto_events([fine]) if "ts" in event]
    assert (odd["ts"], odd["dur"]) == (1234.568, 2345.688)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, "trainer", "nap", 0.0, 1.0, 0), "use one of encode"),
        ((0, "trainer", "train", 2.0, 1.0, 0), "before its start"),
        ((0, "trainer", "wait", 0.0, 1.0, 0), "first_fragment"),
        ((0, "trainer", "train", 0.0, 1.0, 0, {"rank": 3}), "rename"),
    ],
)
def test_bad_spans_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Span(*arguments)


@pytest.mark.parametrize(
    "field",
    [{"rank": -1}, {"rank": 2**53 + 1}, {"step": 2**53 + 1}, {"step": -2}, {"end": 1.1e10}, {"start": -1.1e10}],
    ids=str,
)  # fmt: skip
def test_only_numbers_that_a_rank_can_write_are_read(field: dict[str, float]) -> None:
    record = {"rank": 2**53, "role": "trainer", "stage": "train", "start": -1e10, "end": 1e10}
    assert Span.from_dict(record).step == -1
    assert Span.from_dict(record | {"step": 2**53}).seconds == 2e10
    with pytest.raises(ValueError, match="is absurd"):
        Span.from_dict(record | field)


class Marks:
    """A device whose work is done when told, 2 s after it was given."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True

    def elapsed_time(self, after: Marks) -> float:
        assert after.done, "the work still goes on"
        return 2000.0


def test_seconds_are_summed_by_stage_and_cause_and_a_device_is_waited_for_by_nobody() -> None:
    marks: list[Marks] = []
    log = SpanLog(None, 0, "trainer", 0.0, mark=lambda: marks.append(Marks()) or marks[-1])
    log.add_span("wait", 0.25, 0.75, cause="tail")
    log.add_span("wait", 2.0, 2.25, cause="tail")
    log.add_span("wait", 3.0, 3.125, cause="reward")
    assert log.take_seconds() == {("wait", "tail"): 0.75, ("wait", "reward"): 0.125}
    assert log.take_seconds() == {}
    took: list[float] = []
    began = log.now()
    for _ in range(2):
        with log.span("train", took=took.append, step=0):
            pass
    log.add_span("wait", began, began + 1.0, cause="tail")  # the device works: nobody waits
    assert log.take_seconds() == {("wait", "tail"): 0.0}
    for mark in marks:
        mark.done = True
    log.record_finished()
    assert took == pytest.approx([2.0, 2.0], abs=1e-3)
    assert log.take_seconds() == {("train", ""): pytest.approx(4.0, abs=1e-3)}
    # the second work began when the first was done, and what follows begins after both
    log.add_span("wait", began, began + 5.0, cause="tail")
    assert log.take_seconds()["wait", "tail"] == pytest.approx(1.0, abs=0.1)
    for number in (3, 4):
        with log.span("train", took=took.append, step=0):
            pass
        for mark in marks[: 2 * number if number == 3 else 0]:
            mark.done = True
        log.add_span("wait", began, began + 0.5, cause="tail")  # sees what is done
        assert len(took) == 3
    log.close()  # waits for the work
    assert took == pytest.approx([2.0] * 4, abs=1e-3)


def test_without_a_device_work_is_done_when_its_span_ends_and_a_closed_log_holds_no_file(
    tmp_path: Path,
) -> None:
    lowest = os.dup(0)
    os.close(lowest)
    log, took = SpanLog(tmp_path / "spans.jsonl", 0, "trainer", 0.0), list[float]()
    with log.span("train", took=took.append):
        pass
    assert len(took) == 1
    assert 0.0 <= took[0] < 10.0
    log.close()
    again = os.dup(0)
    os.close(again)
    assert again == lowest


def test_a_log_says_what_its_rank_does_and_rounds_to_microseconds(tmp_path: Path) -> None:
    path = tmp_path / "spans" / "rank-002.jsonl"
    log = SpanLog(path, 2, "rollout", unix_time())
    said: list[str] = []
    with log.stage("wait weights"):
        said += [log.progress.said, log.progress.current_stretches()[0].stage]
    for args in ({"group": 3, "version": 1}, {"version": 1}, {"cause": "tail"}, {"what": "reduce"}):
        with log.span("wait", **args) as facts:
            said.append(log.progress.said)
            facts["late"] = True
    with log.span("send", quiet=True):
        said += [log.progress.said, log.progress.current_stretches()[0].stage]
    assert said == [
        "wait weights", "wait weights", "wait g3", "wait v1", "wait tail", "wait reduce",
        "wait reduce", "send",
    ]  # fmt: skip
    assert 0 <= log.now() < 60
    log.add_span("eval", 1.23456789, 2.3456789, step=3)
    log.close()
    log.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[-1] == {
        "rank": 2, "role": "rollout", "stage": "eval", "start": 1.234568, "end": 2.345679, "step": 3,
    }  # fmt: skip
    assert all(row["late"] for row in rows[:4])
    assert len(rows) == 6


def test_lines_are_written_each_second_and_by_the_thousand(tmp_path: Path) -> None:
    path = tmp_path / "rank-000.jsonl"
    log = SpanLog(path, 0, "trainer", 0.0)

    def written() -> int:
        return len(path.read_text().splitlines()) if path.exists() else 0

    counts = []
    for number in range(2500):
        log.add_span("train", 0.0, 1.0 if number < 2001 else 2.5, quiet=True)
        counts.append(written() if number % 1000 < 3 or number % 1000 > 997 else 0)
    assert counts[998:1002] == [0, 1000, 1000, 1000]
    assert counts[1998:2003] == [1000, 2000, 2000, 2002, 2002]
    assert log.take_seconds() == {("train", ""): 2001 * 1.0 + 499 * 2.5}
    path.unlink()
    log = SpanLog(path, 0, "trainer", 0.0)
    log.add_span("train", 0.0, 1.5, quiet=True)
    assert written() == 1, "a crash loses the last second"


def test_a_record_without_fields_is_named() -> None:
    with pytest.raises(ValueError, match="lacks role"):
        Span.from_dict({"rank": 0, "stage": "train", "start": 0, "end": 1})


def test_what_was_left_out_is_summed_by_stage_and_cause_in_the_last_line(tmp_path: Path) -> None:
    log = SpanLog(tmp_path / "spans.jsonl", 2, "rollout", 0.0, limit=0)
    log.add_span("generate", 0.0, 1.5)
    log._flush_lines(log._file)  # type: ignore[arg-type]
    for seconds in (0.5, 2.0):
        log.add_span("generate", 2.0, 2.0 + seconds)
        log.add_span("wait", 2.0, 2.0 + seconds / 2, cause="tail")
    log.close()
    first, last = map(json.loads, (tmp_path / "spans.jsonl").read_text().splitlines())
    assert (first["stage"], first["end"]) == ("generate", 1.5)
    left = {"generate": 2.5, "wait tail": 1.25}
    assert last == {"left_out": left, "rank": 2, "role": "rollout"}


def test_a_span_may_end_when_it_begins() -> None:
    assert Span(0, "trainer", "train", 1.0, 1.0, 0).end == 1.0
