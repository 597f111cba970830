"""A run directory that came from anywhere: whatever its files hold, a report is made, and says what
was left out."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from digenrl.cli import report
from digenrl.record.run_dir import append_jsonl
from digenrl.report.build import rebuild_report
from digenrl.report.page import plots
from digenrl.report.page.plots import PICTURES
from digenrl.report.read_run import is_number, read_run
from tests.report.synthetic import EPOCH, write_run

ABSURD: tuple[Any, ...] = (
    "x", 1e300, -1, -1e300, 10**400, math.nan, math.inf, True, None, [], {}, [[[1]]], {"a": {"b": 1}}, "\ud800",
    "<script>alert(1)</script>", "x" * 5000, 2**63,
)  # fmt: skip
KEYS = {
    "events.jsonl": ("time", "kind", "status", "cause", "message", "rl_step", "samples", "world", "identities", "file",
                     "lines", "logger", "failures", "of", "by", "times", "reward", "reason", "rank"),
    "metrics.jsonl": ("time", "kind", "rl_step", "reward", "step_s", "samples", "heldout", "staleness_max", "kl"),
    "spans/rank-000.jsonl": ("rank", "role", "stage", "start", "end", "step", "cause", "left_out", "group", "args"),
}  # fmt: skip
LINES = (
    b"{", b"[1, 2]", b"null", b"\xff\xfe", b"{" * 100_000, b"[" * 100_000 + b"]" * 100_000, b"NaN", b"x" * 3_000_000,
    b'{"kind": "step", "rl_step": 3, "rew', b'{"n":' + b"9" * 6000 + b"}", b"\x00" * 50, b'{"left_out": 3}',
    b'{"left_out": {"wait tail": 1e999}, "role": "trainer", "rank": 0}', b"",
)  # fmt: skip
CONFIGS = (
    "reward: [1, 2]", "reward: {rewards: x}", "reward: {rewards: {a: 3}, heldout: {b: {weight: x}}}", "[1]", "x: [",
    "experiment_name: {a: 1}", "!!python/object/apply:os.system [true]", "data: x", "a: &a [*a]", "\x00",
    "reward: {rewards: {1: {weight: [1]}}}",
)  # fmt: skip


def damaged(path: Path, rng: random.Random) -> None:
    """Lines of a run, with absurd values in their fields, between its own."""
    for name, keys in KEYS.items():
        file = path / name
        lines = file.read_bytes().splitlines()
        for _ in range(40):
            row = json.loads(rng.choice(lines[:40]))
            row |= {key: rng.choice(ABSURD) for key in rng.sample(keys, rng.randint(1, 3))}
            lines.insert(rng.randrange(len(lines)) + 1, json.dumps(row).encode())
        for line in rng.sample(LINES, 4):
            lines.insert(rng.randrange(len(lines)) + 1, line)
        file.write_bytes(b"\n".join(lines) + b"\n")
    (path / "config.yaml").write_text(rng.choice(CONFIGS))


@pytest.mark.parametrize("seed", range(10))
def test_whatever_the_files_hold_a_report_is_made(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plots, "PICTURES", {})
    path = write_run(tmp_path / "run", steps=4, samples=False)
    damaged(path, random.Random(seed))
    assert report.main([f"run={path}"]) == 0
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert "could not be made" not in captured.err
    html = (path / "report.html").read_text(encoding="utf-8")
    assert "<script" not in html
    assert json.loads((path / "summary.json").read_text())["warnings"]


@pytest.mark.heavy
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed else ()) for seed in range(12)]
)
def test_whatever_the_files_hold_its_pictures_are_drawn_or_named(tmp_path: Path, seed: int) -> None:
    path = write_run(tmp_path / "run", steps=4, samples=False)
    damaged(path, random.Random(1000 + seed))
    (path / "samples").mkdir()
    for step, content in ((0, b"no archive"), (4, b"")):
        (path / "samples" / f"eval-{step}.npz").write_bytes(content)
    summary = rebuild_report(path)
    named = [
        warning.split(" could not")[0]
        for warning in summary["warnings"]
        if "could not be made" in warning
    ]
    assert set(named) == {
        "samples/before_after.png",
        "plots/reward_distribution.png",
        "the gallery",
    }
    assert (path / "plots" / "timeline.png").exists()
    assert {*PICTURES, "the gallery"} >= set(named)


def test_what_is_left_out_is_named_with_file_and_line_once(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=1, samples=False)
    lines = len((path / "events.jsonl").read_bytes().splitlines())
    append_jsonl(path / "events.jsonl", {"time": EPOCH, "kind": "missing", "samples": "x"})
    append_jsonl(path / "events.jsonl", {"time": 1e300, "kind": "start"})
    (warning,) = read_run(path).warnings
    assert warning.startswith(
        f"events.jsonl: 2 damaged line(s) left out; the first is line {lines + 1}: samples = 'x'"
    )


@pytest.mark.parametrize("value", [10**400, math.nan, -math.inf, True, "1", None])
def test_what_is_no_number_is_none(value: object) -> None:
    assert not is_number(value)


def link_files(path: Path, secret: Path) -> None:
    """Every file of the run that a report reads becomes a link out of the run."""
    for name in ("config.yaml", "logs/rank-000.log", "samples/eval-0.npz", "spans/rank-000.jsonl"):
        (path / name).unlink()
        (path / name).symlink_to(secret)


def link_folders(path: Path, secret: Path) -> None:
    for name in ("logs", "samples", "spans", "plots"):
        outside = secret.parent / name
        (path / name).rename(outside) if (path / name).is_dir() else outside.mkdir()
        for file in outside.iterdir():
            file.write_bytes(secret.read_bytes())
        (path / name).symlink_to(outside)


def make_pipes(path: Path, _: Path) -> None:
    for name in ("config.yaml", "logs/rank-000.log", "samples/eval-0.npz", "spans/rank-000.jsonl"):
        (path / name).unlink()
        os.mkfifo(path / name)


@pytest.mark.heavy
@pytest.mark.timeout(60)
@pytest.mark.parametrize("change", [link_files, link_folders, make_pipes])
def test_no_link_out_of_the_run_is_followed_and_no_pipe_is_waited_for(
    tmp_path: Path, change: Callable[[Path, Path], None]
) -> None:
    path = write_run(tmp_path / "run", steps=2)
    (path / "logs").mkdir()
    (path / "logs" / "rank-000.log").write_text("a line\n")
    secret = tmp_path / "secret"
    row = {"rank": 0, "role": "rollout", "stage": "HIDDEN", "start": 0, "end": 1}
    secret.write_text(json.dumps(row) + "\n")
    change(path, secret)
    outside = {file: file.read_bytes() for file in tmp_path.glob("[!r]*/*")}
    summary = rebuild_report(path)
    for file in ("report.html", "summary.json", "trace.json"):
        assert "HIDDEN" not in (path / file).read_text()
    assert {file: file.read_bytes() for file in tmp_path.glob("[!r]*/*")} == outside
    assert summary["warnings"]
