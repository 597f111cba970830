"""Synthetic runs shared by the tests of reports."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from digenrl.report.build import rebuild_report
from tests.report.synthetic import write_run


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a finished run, not to be changed by a test."""
    return write_run(tmp_path_factory.mktemp("finished") / "digits_flowgrpo" / "run-0")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with everything built from it (some seconds), not to be changed by a test."""
    path = write_run(tmp_path_factory.mktemp("built") / "digits_flowgrpo" / "run-0", steps=16)
    rebuild_report(path)
    return path


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """What `kill -9` of everything leaves: no end, torn last lines, no derived file, no
    pictures."""
    path = write_run(tmp_path / "digits_flowgrpo" / "run-1", steps=9, ended=False, samples=False)
    for name in ("metrics.jsonl", "events.jsonl", "spans/rank-002.jsonl"):
        with (path / name).open("ab") as file:
            file.write('{"kind": "step", "rl_step": 10, "reward": 0.7, "note": "ä'.encode()[:-1])
    shutil.rmtree(path / "samples", ignore_errors=True)
    return path
