"""The grid of one RL step, and which run is meant when none is named."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from digenrl.extensions.page.grid import draw_grid, read_grid
from digenrl.extensions.page.newest import newest_run
from digenrl.extensions.page.style import paper_style
from digenrl.report.read_run import read_run
from tests.report.synthetic import GROUPS, write_run


def test_rows_are_written_from_left_to_right_and_groups_in_order(finished: Path) -> None:
    grid = read_grid(read_run(finished), step=3)
    assert grid.written.shape == (GROUPS * 16, 6)
    assert not np.isnan(grid.written).any()
    assert (np.diff(grid.written, axis=1) > 0).all()
    complete = grid.written[:, -1].reshape(GROUPS, 16).max(axis=1)
    assert (np.diff(complete) > 0).all()
    assert (grid.trained > complete).all()
    assert set(np.unique(grid.writer)) == {2.0, 3.0}
    with paper_style():
        assert len(draw_grid(grid).axes) == 3


def test_a_step_without_spans_is_refused(finished: Path) -> None:
    with pytest.raises(ValueError, match=r"no generation spans of RL step 99.*\[0\] to \[23\]"):
        read_grid(read_run(finished), step=99)


def test_newest_run_is_the_one_that_changed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.delenv("RUN", raising=False)
    with pytest.raises(FileNotFoundError, match="make train"):
        newest_run()
    for name, age in [("new", 10), ("old", 500)]:
        path = write_run(tmp_path / "outputs" / "digits" / name, steps=1, samples=False)
        changed = (path / "metrics.jsonl").stat().st_mtime - age
        os.utime(path / "metrics.jsonl", (changed, changed))
    assert newest_run().name == "new"
    monkeypatch.setenv("RUN", str(tmp_path / "outputs" / "digits" / "old"))
    assert newest_run().name == "old"
