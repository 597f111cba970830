"""The files of a run directory, byte for byte, and what a disk that takes no more leaves behind."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import digenrl
from digenrl.record import run_dir
from digenrl.record.code_version import code_version
from digenrl.record.line_file import LineFile
from digenrl.record.run_dir import (
    EVENTS,
    append_event,
    append_jsonl,
    atomic_replace,
    free_space,
    hold_reserve,
    json_safe,
    limit_events,
    release_reserve,
    tell_unwritten,
    unix_time,
    write_events_of,
    write_json,
    write_trace,
    write_whole,
)
from digenrl.report.read_run import read_run


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test counts for itself what was not written."""
    run_dir._unwritten.clear()
    yield
    run_dir._unwritten.clear()
    run_dir._events_name = EVENTS
    limit_events(math.inf)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_machines_write_events_of_their_own_and_the_report_reads_them_in_order(
    tmp_path: Path,
) -> None:
    """NFS makes an append atomic only within a machine."""
    hosts = "", "10.0.0.2", "fe80::1%eth0", "10.0.0.2", ""
    for number, host in enumerate(hosts):
        run_dir._events_name = EVENTS
        if host:
            write_events_of(host)
        append_event(tmp_path, "warning", {"message": str(number)})
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["events-10.0.0.2.jsonl", "events-fe80--1-eth0.jsonl", "events.jsonl"]
    assert [row["message"] for row in lines(tmp_path / "events-10.0.0.2.jsonl")] == ["1", "3"]
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    assert [event["message"] for event in read_run(tmp_path).events] == list("01234")


def test_a_reserve_is_held_and_released_once(tmp_path: Path) -> None:
    assert not release_reserve(tmp_path)
    hold_reserve(tmp_path)
    (kept,) = tmp_path.iterdir()
    assert kept.stat().st_size == 64 << 10
    assert release_reserve(tmp_path)
    assert not release_reserve(tmp_path)
    assert not list(tmp_path.iterdir())
    hold_reserve(tmp_path / "nowhere")


def test_free_space_is_said_in_mebibytes(tmp_path: Path) -> None:
    said, unit, free = free_space(tmp_path).split()
    assert (unit, free) == ("MiB", "free")
    assert float(said) == pytest.approx(shutil.disk_usage(tmp_path).free / 2**20, rel=0.05)
    assert free_space(tmp_path / "nowhere") == (
        "its disk does not answer: No such file or directory"
    )


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with atomic_replace(path) as temporary:
        assert re.fullmatch(r"\.a\.txt\.[0-9a-f]{16}\.tmp", temporary.name)
        assert temporary.parent == tmp_path
        temporary.write_text("one")
        assert not path.exists()
    assert path.read_text() == "one"

    def fails() -> None:
        with atomic_replace(path) as temporary:
            temporary.write_text("two")
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fails()
    assert (path.read_text(), list(tmp_path.iterdir())) == ("one", [path])


def test_a_line_makes_the_directories_of_its_file(tmp_path: Path) -> None:
    append_jsonl(tmp_path / "run" / "deep" / "metrics.jsonl", {"a": 1})
    assert lines(tmp_path / "run" / "deep" / "metrics.jsonl") == [{"a": 1}]


def test_values_become_json_and_a_line_its_bytes(tmp_path: Path) -> None:
    row = {1: (math.nan, -math.inf, 2.5), "p": Path("a/b"), "t": torch.tensor(3), "n": None}
    assert json_safe(row) == {"1": [None, None, 2.5], "p": "a/b", "t": 3, "n": None}
    path = tmp_path / "new" / "metrics.jsonl"
    append_jsonl(path, {"a": [1, "größer"], "b": math.nan})
    path.open("a").write('{"torn":')
    append_jsonl(path, {"c": "\ud800"})
    append_jsonl(path, {"d": 1})
    wanted = '{"a":[1,"größer"],"b":null}\n{"torn":\n{"c":"?"}\n{"d":1}\n'
    assert path.read_text() == wanted
    assert path.stat().st_mode & 0o777 == 0o644 & ~_umask()
    lowest = os.dup(0)
    os.close(lowest)
    append_jsonl(tmp_path / "other.jsonl", {})
    again = os.dup(0)
    os.close(again)
    assert again == lowest, "no descriptor stays open"
    link = tmp_path / "events.jsonl"
    link.symlink_to(path)
    append_jsonl(link, {"e": 1})
    assert path.read_text() == wanted, "links are not followed"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_part_of_a_line_is_an_error() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    write_whole(writing, b"x" * 1000)
    with pytest.raises(OSError, match="No space left"):
        write_whole(writing, b"x" * (1 << 20))
    os.close(reading)
    os.close(writing)


def test_an_event_has_its_time_and_no_secret(tmp_path: Path) -> None:
    before = unix_time()
    assert append_event(tmp_path, "lost", {"rank": 3, "cause": "api_key=canary-canary"})
    assert append_event(tmp_path, "end")
    first, second = lines(tmp_path / "events.jsonl")
    assert list(first) == ["time", "kind", "rank", "cause"]
    assert (first["kind"], first["rank"], first["cause"]) == ("lost", 3, "api_key=<redacted>")
    assert before <= first["time"] <= second["time"] <= unix_time()


def test_routine_events_end_at_the_limit_and_others_do_not(tmp_path: Path) -> None:
    append_event(tmp_path, "end")
    size = (tmp_path / "events.jsonl").stat().st_size
    limit_events(size + 1)
    assert append_event(tmp_path, "publish", {"version": 1})
    limit_events((tmp_path / "events.jsonl").stat().st_size)
    assert append_event(tmp_path, "lost")
    assert not append_event(tmp_path, "publish", {"version": 2})
    kinds = [row["kind"] for row in lines(tmp_path / "events.jsonl")]
    assert kinds == ["end", "publish", "lost", "unwritten"]


def test_what_is_not_written_is_told_at_once_and_at_the_end(tmp_path: Path) -> None:
    blocked = [tmp_path / name for name in ("metrics.jsonl", "spans/rank-000.jsonl")]
    for path in blocked:
        path.mkdir(parents=True)
    append_jsonl(blocked[0], {"a": 1})
    assert not LineFile(blocked[1]).write(b"{}\n{}\n")
    for _ in range(3):
        append_jsonl(blocked[0], {"a": 1})
    told = lines(tmp_path / "events.jsonl")
    facts = [(row["kind"], row["file"], row["lines"], row["cause"]) for row in told]
    cause = "Is a directory"
    assert facts == [
        ("unwritten", "metrics.jsonl", 1, cause),
        ("unwritten", "spans/rank-000.jsonl", 2, cause),
    ]
    other = tmp_path / "other"
    tell_unwritten(other)
    assert len(lines(tmp_path / "events.jsonl")) == 2, "of another run"
    for _ in range(2):
        tell_unwritten(tmp_path)
    rest = [(row["file"], row["lines"], row["cause"]) for row in lines(tmp_path / "events.jsonl")]
    assert rest[2:] == [("metrics.jsonl", 3, None)]


def test_an_urgent_event_takes_the_reserve_and_gives_up_without_one(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    hold_reserve(tmp_path)
    assert not append_event(tmp_path, "lost", urgent=True)
    assert not (tmp_path / ".reserve").exists()
    assert not append_event(tmp_path, "lost")
    assert run_dir._unwritten[tmp_path / "events.jsonl"] == 1


def test_json_and_traces_are_written_as_they_are_read(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": [1], "ö": math.inf})
    assert (tmp_path / "a.json").read_text() == '{\n  "a": [\n    1\n  ],\n  "ö": null\n}\n'
    write_json(tmp_path / "a.json", {"a": [1]}, indent=None)
    assert (tmp_path / "a.json").read_text() == '{"a": [1]}\n'
    events = [{"ph": "X", "ts": 1.5}, {"ph": "M", "args": {"n": math.nan}}]
    write_trace(tmp_path / "trace.json", events)
    assert (tmp_path / "trace.json").read_text() == (
        '{"displayTimeUnit":"ms","traceEvents":[\n{"ph":"X","ts":1.5},\n'
        '{"ph":"M","args":{"n":null}}\n]}\n'
    )
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"][0] == events[0]


def test_a_line_file_goes_on_after_a_torn_line_and_counts_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "run" / "spans" / "rank-000.jsonl"
    file = LineFile(path)
    assert file.write(b'{"n":1}\n')
    assert file.size == 8
    assert path.stat().st_mode & 0o777 == 0o644 & ~_umask()
    descriptor = file._descriptor
    assert descriptor is not None
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    path.open("ab").write(b'{"torn"')
    assert file.write(b'{"n":2}\n')
    assert file.size == path.stat().st_size == 8 + 8 + 8
    again = LineFile(path)
    assert again.write(b'{"n":3}\n')
    assert path.read_bytes() == b'{"n":1}\n{"torn"\n{"n":2}\n{"n":3}\n'
    assert again.size == 32


def test_the_version_of_the_code_is_the_digest_of_every_source_with_its_name() -> None:
    root, digest = Path(digenrl.__file__).parent, hashlib.sha256()
    names = sorted(Path(name).relative_to(root) for name in root.rglob("*.py"))
    for name in names:
        digest.update(f"{name.as_posix()}\0".encode())
        digest.update((root / name).read_bytes())
    versions = [f"{name} {metadata.version(name)}" for name in ("torch", "diffusers")]
    assert code_version() == ", ".join([f"digenrl {digest.hexdigest()[:12]}", *versions])
    assert LineFile(root / "never opened").size == 0


def test_a_file_that_has_reached_its_limit_takes_no_line(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"{}\n" * 10)
    with pytest.raises(OSError, match=r"record\.keep_mib"):
        run_dir._append_row(path, {}, 30)
    run_dir._append_row(path, {}, 31)
    assert path.stat().st_size == 33
