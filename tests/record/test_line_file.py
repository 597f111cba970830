"""A rank's own record: bounded, ended where it would not replay, and never an error on a full
disk."""

from __future__ import annotations

import os
import resource
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from digenrl.record.line_file import LineFile
from digenrl.record.run_dir import append_event, append_jsonl, limit_events, tell_unwritten
from digenrl.record.span_log import SpanLog
from digenrl.report.build import rebuild_report
from digenrl.report.read_run import read_run
from digenrl.report.summary import build_summary

LIMIT = 64 << 10


def record(run_dir: Path, steps: int, limit: float, groups: int = 2) -> None:
    """What a trainer and a rollout rank record of so many RL steps, by the writers of a run, a
    second a step."""
    logs = {
        role: SpanLog(
            run_dir / "spans" / f"rank-{rank:03d}.jsonl", rank, role, time.time(), limit=limit
        )
        for rank, role in enumerate(("trainer", "rollout"))
    }
    for step in range(steps):
        for group in range(groups):
            at = step + group / groups
            logs["rollout"].add_span(
                "generate", at, at + 0.2, step=step, group=group, version=step, samples=4
            )
            logs["trainer"].add_span("wait", at, at + 0.2, step=step, cause="tail")
            logs["trainer"].add_span("train", at + 0.2, at + 0.4, step=step, group=group, groups=1)
        logs["trainer"].add_span(
            "publish", step + 0.9, step + 1.0, version=step + 1, digest="0" * 16
        )
        append_event(run_dir, "publish", {"version": step + 1, "digest": "0" * 16})
        line = {
            "kind": "step",
            "rl_step": step + 1,
            "reward": step / steps,
            "samples": 8,
            "step_s": 1.0,
        }
        append_jsonl(run_dir / "metrics.jsonl", line | {"time": 1.7e9 + step})
    for log in logs.values():
        log.close()


def in_child(act: Callable[[], None]) -> None:
    """Run `act` in a forked process, and expect no exception."""
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.heavy
def test_a_long_record_keeps_its_first_steps_and_all_seconds(tmp_path: Path) -> None:
    record(tmp_path, 1500, LIMIT)
    record(tmp_path, 500, LIMIT)  # the run begins again
    assert all(file.stat().st_size <= 1.1 * LIMIT for file in (tmp_path / "spans").iterdir())
    run = read_run(tmp_path)
    assert run.warnings == ("config.yaml is missing",)
    for rank in (0, 1):
        steps = sorted({span.step for span in run.spans if span.rank == rank and span.step >= 0})
        assert steps == list(range(len(steps)))
        assert 50 < len(steps) < 1000
    assert build_summary(run)["bubble"] == {
        "trainer": {"tail": pytest.approx(2000 * 2 * 0.2, rel=1e-3)}
    }
    assert run.seconds["rollout", 1]["generate"] == pytest.approx(2000 * 2 * 0.2, rel=1e-3)


def test_a_short_record_keeps_everything(tmp_path: Path) -> None:
    record(tmp_path, 100, LIMIT)
    assert {span.step for span in read_run(tmp_path).spans} >= set(range(100))


def test_routine_events_are_refused_and_counted_beyond_the_limit(tmp_path: Path) -> None:
    def act() -> None:
        limit_events(LIMIT)
        for step in range(3000):
            append_event(tmp_path, "publish", {"version": step})
        append_event(tmp_path, "lost", {"rank": 1, "cause": "died"})
        tell_unwritten(tmp_path)

    in_child(act)
    run = read_run(tmp_path)
    summary = build_summary(run)
    assert (tmp_path / "events.jsonl").stat().st_size < 1.1 * LIMIT
    assert len(run.events_of("publish")) + summary["unwritten"]["events.jsonl"] == 3000
    assert summary["lost"] == ["died"]
    assert any("the limit of record.keep_mib" in warning for warning in summary["warnings"])


def test_a_file_that_takes_no_more_leaves_whole_lines_and_a_count(tmp_path: Path) -> None:
    """The limit on a file's size refuses like a full disk: a part of a block first, then
    everything."""
    path = tmp_path / "spans" / "rank-000.jsonl"

    def act() -> None:
        append_event(tmp_path, "launch")
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        file = LineFile(path)
        results = [file.write(b'{"n":1}\n' * 100) for _ in range(8)]
        assert results == [True] * 5 + [False] * 3
        for step in range(20):
            append_jsonl(
                tmp_path / "metrics.jsonl", {"kind": "step", "rl_step": step, "note": "x" * 1000}
            )
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert file.write(b'{"n":2}\n')
        tell_unwritten(tmp_path)

    in_child(act)
    assert path.read_bytes() == b'{"n":1}\n' * 500 + b'{"n":2}\n'
    summary = build_summary(read_run(tmp_path))
    assert summary["unwritten"] == {"spans/rank-000.jsonl": 300, "metrics.jsonl": 17}
    assert [warning for warning in summary["warnings"] if "lacks 300 line(s)" in warning]


@pytest.mark.slow
def test_a_hundred_thousand_steps_stay_bounded_and_are_read_in_pieces(tmp_path: Path) -> None:
    """Ten spans a step on two ranks: 130 MB unthinned. Bytes on disk, the report's seconds and its
    peak memory."""
    limit = 8 << 20

    def write() -> None:
        limit_events(limit)
        record(tmp_path, 100_000, limit, groups=3)

    in_child(write)
    sizes: dict[str, Any] = {
        str(f.relative_to(tmp_path)): f.stat().st_size for f in tmp_path.rglob("*.jsonl")
    }
    assert all(
        size <= 1.1 * limit for name, size in sizes.items() if not name.startswith("metrics")
    ), sizes
    tracemalloc.start()
    began = time.monotonic()
    summary = rebuild_report(tmp_path)
    seconds, peak = time.monotonic() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(
        f"{seconds:.0f} s, peak {peak / 2**20:.0f} MiB, trace "
        f"{(tmp_path / 'trace.json').stat().st_size / 2**20:.0f}"
    )
    assert summary["rl_steps"] == 100_000
    assert summary["bubble"]["trainer"]["tail"] == pytest.approx(100_000 * 3 * 0.2, rel=1e-3)
    assert (tmp_path / "trace.json").stat().st_size < 8 * limit
    assert peak < 400 << 20
    assert seconds < 300
