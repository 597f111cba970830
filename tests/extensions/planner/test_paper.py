"""The paper's page: ladders that cannot fall, baselines that pay what they do, verdicts in the text."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.paper import (
    LADDER,
    EngineColocated,
    Published,
    climbed,
    scripts,
    settings,
    sharded_loop,
)
from benchmarks.schedule import bench_of
from digenrl.extensions.planner.costing import Costing

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def costing() -> Costing:
    return settings(bench_of("wan21_flowgrpo", "testbed_a")[0], 20, 0.4)


def test_a_row_of_a_ladder_may_leave_its_mechanism_off() -> None:
    runs = dict(zip(LADDER, (50.0, 80.0, 40.0, 45.0, 60.0), strict=True))
    cell = {f"published {name}": {"seconds": s} for name, s in runs.items()}
    cell["scripts"] = {"seconds": 100.0}
    assert list(climbed(cell).values()) == [2.0, 2.0, 2.5, 2.5, 2.5]
    cell["published split"] = None
    assert list(climbed(cell).values()) == [None, 1.25, 2.5, 2.5, 2.5]


def test_their_scripts_gather_in_generation_and_an_engine_does_not(costing: Costing) -> None:
    """The scripts are slower than the same loop without communication; an engine beside the trainer
    moves weights at its switch instead."""
    loop = sharded_loop(costing, 1)
    outcome = scripts(costing)
    assert loop is not None
    assert outcome is not None
    pool = costing.hardware.pools[0]
    step = costing.cluster(loop).ranks[0].step_seconds
    gathering = costing.costs.gather_seconds([pool], 32)
    assert step > costing.costs.step_seconds(pool, 1) + 0.69 * gathering
    engine = EngineColocated(costing.work, costing.hardware)
    rank = engine.cluster(loop).ranks[0]
    assert rank.step_seconds == engine.costs.step_seconds(pool, 1) < step
    assert engine.cluster(loop).switch_seconds > gathering > costing.cluster(loop).switch_seconds
    assert outcome.candidate.recompute.inputs == 1.0


def test_an_engine_changes_generation_alone(costing: Costing) -> None:
    theirs, pool = Published(costing.work, costing.hardware), costing.hardware.pools[0]
    assert theirs.costs.step_seconds(pool, 1) < costing.costs.step_seconds(pool, 1)
    loop = costing.candidate(16, 16, sharding="hsdp")
    assert theirs.cell_seconds(loop) == costing.cell_seconds(loop)
    assert theirs.work == replace(costing.work)


def test_the_page_counts_what_its_tables_show() -> None:
    page = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    verdict = re.search(r"within 15 %: (\d+) of (\d+)", page)
    errors = re.findall(r"\| ([+-]\d+)% \| (.*?) \|\n", page)
    assert verdict is not None
    assert len(errors) + page.count("| does not fit | ") >= int(verdict[2])
    assert sum(not cause for _, cause in errors) == int(verdict[1])
    assert all(abs(int(error)) <= 15 for error, cause in errors if not cause)
