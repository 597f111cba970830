"""A small storm; `make chaos` makes larger ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import chaos


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_small_storm_changes_no_weights_and_restarts_no_trainer(tmp_path: Path) -> None:
    found = chaos(tmp_path, seed=11, events=6)
    assert (len(found["events"]), found["trainer_restarts"]) == (6, 0)
    assert found["bit_equal"]
