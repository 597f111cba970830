"""Reading and writing a run directory: whole lines, torn lines, resumed runs."""

from __future__ import annotations

import json
import math
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from digenrl.record.run_dir import append_event, append_jsonl, json_safe
from digenrl.report.read_run import JsonlTail, read_run
from tests.report.synthetic import EPOCH, write_lines, write_run


def test_a_line_after_a_torn_one_begins_on_its_own(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"rl_step": 1}\n{"rl_step": 2, "rew')
    append_jsonl(path, {"rl_step": 3})
    tail = JsonlTail(path)
    assert tail.read_new_rows() == [{"rl_step": 1}, {"rl_step": 3}]


def test_tail_returns_each_line_once_and_only_when_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = JsonlTail(path)
    assert tail.read_new_rows() == []
    with path.open("ab") as file:
        for piece, expected in [
            (b'{"a": 1}\n{"a"', [{"a": 1}]),
            (b': "\xc3', []),
            (b'\xa4"}\n', [{"a": "ä"}]),
            (b"", []),
        ]:
            file.write(piece)
            file.flush()
            assert tail.read_new_rows() == expected


@given(st.lists(st.integers(1, 40), max_size=6))
def test_tail_does_not_depend_on_where_the_file_is_cut(cuts: list[int]) -> None:
    import tempfile

    data = b'{"n": 1}\n{"text": "\xe2\x86\x92"}\n{"n": 3}\n'
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.jsonl"
        tail, rows, at = JsonlTail(path), [], 0
        for cut in [*sorted(cuts), len(data)]:
            with path.open("ab") as file:
                file.write(data[at:cut])
            at = max(at, cut)
            rows += tail.read_new_rows()
    assert rows == [{"n": 1}, {"text": "→"}, {"n": 3}]


def _append_many(path: str, writer: int) -> None:
    for index in range(200):
        append_jsonl(path, {"writer": writer, "index": index, "text": "x" * 300})


def test_several_processes_may_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [
        context.Process(target=_append_many, args=(str(path), writer)) for writer in range(3)
    ]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    tail = JsonlTail(path)
    rows = tail.read_new_rows()
    assert {(row["writer"], row["index"]) for row in rows} == {
        (w, i) for w in range(3) for i in range(200)
    }


def test_what_json_cannot_hold_becomes_null() -> None:
    row = {
        "nan": math.nan,
        "inf": np.float32("inf"),
        "number": np.float64(0.5),
        "list": [math.nan, 1],
        "path": Path("a"),
    }
    assert json_safe(row) == {
        "nan": None,
        "inf": None,
        "number": 0.5,
        "list": [None, 1],
        "path": "a",
    }


def test_a_resumed_run_repeats_its_steps_and_the_later_ones_count(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    for step in (1, 2, 3, 4, 5):
        append_jsonl(path / "metrics.jsonl", {"kind": "step", "rl_step": step, "reward": 0.1})
        append_jsonl(path / "metrics.jsonl", {"kind": "eval", "rl_step": step, "heldout": 0.1})
    append_jsonl(
        path / "metrics.jsonl", {"kind": "eval", "rl_step": 4, "heldout": 0.2}
    )  # evaluation may come first
    append_jsonl(path / "metrics.jsonl", {"kind": "step", "rl_step": 4, "reward": 0.2})
    run = read_run(path)
    assert run.column("reward") == ([1, 2, 3, 4], [0.1, 0.1, 0.1, 0.2])
    assert run.column("heldout", "eval") == ([1, 2, 3, 4], [0.1, 0.1, 0.1, 0.2])


def test_spans_of_a_resumed_attempt_follow_the_first(tmp_path: Path) -> None:
    path = tmp_path / "run"
    (path / "spans").mkdir(parents=True)
    write_lines(
        path / "events.jsonl",
        [{"time": EPOCH, "kind": "launch"}, {"time": EPOCH + 1000, "kind": "launch"}],
    )
    span = {"rank": 0, "role": "trainer", "stage": "train", "step": 0}
    times = [
        (0, 9),
        (9, 20),
        (8, 19.5),
        (0.5, 3),
        (3, 30),
    ]  # the third began before and was written after the second
    write_lines(
        path / "spans" / "rank-000.jsonl",
        [{**span, "start": start, "end": end} for start, end in times],
    )
    starts = sorted(span.start for span in read_run(path).spans)
    assert starts == [0, 8, 9, 1000.5, 1003]


def test_a_crashed_run_is_read_up_to_the_torn_lines(crashed: Path) -> None:
    run = read_run(crashed)
    assert [row["rl_step"] for row in run.steps] == list(range(1, 10))
    assert [warning.split(":")[0] for warning in run.warnings] == [
        "metrics.jsonl",
        "events.jsonl",
        "rank-002.jsonl",
    ]


def test_spans_that_break_the_format_are_named_not_lost_silently(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=2)
    with (path / "spans" / "rank-000.jsonl").open("a") as file:
        file.write(
            json.dumps({"rank": 0, "role": "trainer", "stage": "napping", "start": 1, "end": 2})
            + "\n"
        )
    assert any(
        "1 damaged line(s) left out" in warning and "napping" in warning
        for warning in read_run(path).warnings
    )


def test_no_run_directory_names_the_runs_nearby(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such directory"):
        read_run(tmp_path / "missing")
    write_run(tmp_path / "outputs" / "run-0", steps=1, samples=False)
    with pytest.raises(FileNotFoundError, match=r"not a run directory.*run-0"):
        read_run(tmp_path / "outputs")


def test_the_directory_of_a_plan_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("plan: {show: 3}\n")
    with pytest.raises(FileNotFoundError, match="directory of a plan"):
        read_run(tmp_path)


def test_events_carry_their_time(tmp_path: Path) -> None:
    append_event(tmp_path, "launch", {"world": {"trainer": 1}})
    (event,) = read_run(tmp_path).events_of("launch")
    assert event["world"] == {"trainer": 1}
    assert event["time"] > EPOCH


@pytest.mark.parametrize("pieces", [(b"x" * (1 << 21),), (b"x" * (1 << 19),) * 5])
def test_tail_leaves_a_line_out_that_is_too_long(tmp_path: Path, pieces: tuple[bytes, ...]) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = JsonlTail(path)
    path.write_bytes(b'{"n": 1}\n')
    rows = tail.read_new_rows()
    for piece in pieces:
        with path.open("ab") as file:
            file.write(piece)
        rows += tail.read_new_rows()
    with path.open("ab") as file:
        file.write(b'{"n": 2}\n\n"text"\n{"n": 3}\n{"n')
    assert rows + tail.read_new_rows() == [{"n": 1}, {"n": 3}]
    assert len(tail._rest) < 10
