"""Spans: one format for runtime and simulator."""

from __future__ import annotations

import json

import pytest

from digenrl.record.spans import Span, perfetto

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
    events = list(perfetto(SPANS))
    bars = [event for event in events if event["ph"] == "X"]
    assert {(event["tid"], event["ts"], event["dur"]) for event in bars} >= {
        (0, 1e6, 2e6),
        (2, 0.0, 1e6),
    }
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} >= {
        "trainer",
        "rollout",
        "trainer 0",
    }


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


def test_a_record_without_fields_is_named() -> None:
    with pytest.raises(ValueError, match="lacks role"):
        Span.from_dict({"rank": 0, "stage": "train", "start": 0, "end": 1})
