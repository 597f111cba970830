"""The end of a run as a table."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from digenrl.report.alarms import find_alarms
from digenrl.report.read_run import read_run
from digenrl.report.summary import build_summary
from digenrl.report.tables import final_table
from tests.report.synthetic import write_lines, write_run


@pytest.mark.parametrize("width", [40, 80, 200])
def test_end_table_fits_and_names_status_and_alarms(tmp_path: Path, width: int) -> None:
    summary = build_summary(
        read_run(write_run(tmp_path / "digits_flowgrpo" / "run", steps=8, samples=False))
    )
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(final_table({**summary, "diversity_ratio": 0.4}))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "completed" in text
    assert "mode collapse" in text.replace("\n", " ")
    assert max(len(line) for line in text.splitlines()) <= width


def test_the_launcher_side_imports_no_torch() -> None:
    code = (
        "import sys, digenrl.report.tables, digenrl.report.build; assert not {'torch', 'lightning'} & "
        "set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": "src", "PATH": "/usr/bin:/bin"}
    )


CURVE = """published:
  - {reward: ocr, first: 0.34, last: 0.8, steps: 600, gpu_hours: null, measured: rollouts, source: MD 239}
reward: {rewards: {ocr: {weight: 1.0}}}
"""


def ended(path: Path, more: str = "") -> str:
    """The end table of a written run whose config.yaml has `more`."""
    run = write_run(path / "run", steps=8, samples=False)
    with (run / "config.yaml").open("a") as config:
        config.write(more)
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    console.print(final_table(build_summary(read_run(run))))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_published_curve_stands_beside_the_runs_own(tmp_path: Path) -> None:
    summary = build_summary(read_run(write_run(tmp_path / "other", steps=8, samples=False)))
    own = f"{summary['reward_first']:.3g} → {summary['reward_last']:.3g} after 8"
    told = ended(tmp_path, CURVE)
    assert f"ocr 0.34 → 0.8 in 600 RL steps (MD 239; rollouts); this run: {own}" in told
    tiny = ended(tmp_path / "tiny", CURVE + "model: {build: tiny}\n")
    assert "a tiny random build: no comparison" in tiny


def test_no_published_curve_is_said(tmp_path: Path) -> None:
    assert "no curve is known for this recipe" in ended(tmp_path)
    other = CURVE.replace("rewards: {ocr", "rewards: {clip")
    assert "no curve is known for this recipe" in ended(tmp_path / "other", other)


def test_an_embedded_task_says_nothing_of_published_curves(tmp_path: Path) -> None:
    assert "published" not in ended(tmp_path, "model: {path: null, lora: null}\n")
    assert "no curve is known" in ended(tmp_path / "real", "model: {build: real}\n")


def test_a_step_that_waits_for_people_is_never_late(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=8, samples=False)
    late = "times what the schedule predicted"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    write_lines(run / "metrics.jsonl", [row | {"predicted_step_s": 0.1} for row in rows])
    assert late in " ".join(find_alarms(build_summary(read_run(run))))
    (run / "votes").mkdir()
    assert late not in " ".join(find_alarms(build_summary(read_run(run))))


@pytest.mark.parametrize(
    "entries",
    [
        "7",
        "[7]",
        "[{reward: ocr}]",
        "[{reward: ocr, first: a, last: .nan}]",
        "[{first: 1, last: 2}]",
    ],
)
def test_a_foreign_entry_is_left_out(tmp_path: Path, entries: str) -> None:
    more = f"published: {entries}\nreward: {{rewards: {{ocr: {{weight: 1.0}}}}}}\n"
    assert "no curve is known for this recipe" in ended(tmp_path, more)
