"""A run beside its plan: seconds per unit of each stage, and GiB of each rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from digenrl.report.page.html import render_page
from digenrl.report.read_run import Run, read_run
from digenrl.report.stages import unit_seconds
from digenrl.report.summary import build_summary
from digenrl.report.tables import key_figures
from tests.report.synthetic import write_lines, write_run

EXPECTED = {
    "gib": {"trainer": 62.0, "rollout": 40.5},
    "seconds": {"generate": 0.05, "train": 0.002, "encode": 0.1},
}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def planner_prediction(path: Path, **metric: Any) -> Run:
    """A synthetic run whose launch has a plan, and whose steps have `metric`."""
    write_run(path, steps=6, samples=False)
    launch, *events = lines(path / "events.jsonl")
    write_lines(path / "events.jsonl", [launch | {"expected": EXPECTED}, *events])
    rows = lines(path / "metrics.jsonl")
    steps = [row | {"cells_trained": 480} | metric for row in rows if row["kind"] == "step"]
    write_lines(path / "metrics.jsonl", steps)
    return read_run(path)


def test_the_summary_sets_seconds_per_unit_beside_the_plan(tmp_path: Path) -> None:
    run = planner_prediction(tmp_path / "run")
    train = sum(s.seconds for s in run.spans if s.stage == "train" and s.step > 0)
    made = [s.seconds for s in run.spans if s.stage == "generate" and s.step > 0]
    stages = build_summary(run)["stages"]
    assert set(stages) == set(EXPECTED["seconds"])
    assert stages["train"] == {"planned_s": 0.002, "measured_s": pytest.approx(train / 5 / 480)}
    assert stages["generate"]["measured_s"] == pytest.approx(sum(made) / len(made) / 8)
    assert stages["encode"] == {"planned_s": 0.1, "measured_s": None}
    told = dict(key_figures(build_summary(run)))["furthest from plan"]
    ratios = [stages[s]["measured_s"] / stages[s]["planned_s"] for s in ("train", "generate")]
    assert told.endswith(f"{max(ratios, key=lambda r: max(r, 1 / r)):.2f} x")


def test_a_thinned_record_counts_the_cells_of_the_steps_that_it_has(tmp_path: Path) -> None:
    run = planner_prediction(tmp_path / "run")
    whole = unit_seconds(run)["train"]
    for path in (tmp_path / "run" / "spans").iterdir():
        write_lines(path, [row for row in lines(path) if row["step"] != 3])
    assert unit_seconds(read_run(tmp_path / "run"))["train"] == pytest.approx(whole, rel=0.2)


def test_the_peak_stands_beside_the_plan(tmp_path: Path) -> None:
    peaks = {"0": {"train": 58.25, "other": 9.0}, "1": {"train": 58.5}, "3": {"decode": 31.0}}
    run = planner_prediction(tmp_path / "run", peak_gib=peaks)
    summary = build_summary(run)
    assert summary["memory"]["trainer"] == {
        "planned_gib": 62.0,
        "peak_gib": 58.5,
        "ranks": {"0": peaks["0"], "1": peaks["1"]},
    }
    table = dict(key_figures(summary))
    assert table["memory, trainer"] == "planned 62.0 GiB, peak 58.5"
    assert table["memory, rollout"] == "planned 40.5 GiB, peak 31.0"
    page = render_page(run, summary, {})
    assert "<td>3, rollout</td><td>40.5</td><td>31.0</td>" in " ".join(page.split())
    assert "measured / planned" in page


def test_on_processors_the_peak_is_null_and_not_zero(tmp_path: Path) -> None:
    run = planner_prediction(tmp_path / "run", peak_gib=None)
    summary = build_summary(run)
    assert summary["memory"]["trainer"]["peak_gib"] is None
    assert not [name for name, _ in key_figures(summary) if name.startswith("memory")]
    assert "GiB of each GPU" not in render_page(run, summary, {})


def test_a_run_without_a_plan_compares_nothing(finished: Path) -> None:
    summary = build_summary(read_run(finished))
    assert (summary["stages"], summary["memory"]) == ({}, {})


@pytest.mark.parametrize("value", [{"zero": {"train": 1.0}}, {"0": {"train": "much"}}, {"0": 3}, 7])
def test_a_peak_that_is_none_is_left_out_with_its_line(tmp_path: Path, value: Any) -> None:
    run = planner_prediction(tmp_path / "run", peak_gib=value)
    assert run.steps == ()
    assert build_summary(run)["memory"]["trainer"]["peak_gib"] is None
