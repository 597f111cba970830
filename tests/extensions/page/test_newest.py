"""A notebook that names no run takes the newest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from digenrl.extensions.page.newest import newest_run
from tests.report.synthetic import write_run


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
