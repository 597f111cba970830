"""A short soak; `make soak` makes the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import figures, soak


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_some_hundred_steps_leave_memory_files_directory_and_report_as_they_were(
    tmp_path: Path,
) -> None:
    found = soak(tmp_path, steps=400)
    assert found["steps"] == 400
    assert not found["grown"]


def test_growth_is_that_between_the_warm_steps_and_the_last() -> None:
    def sample(step: int, memory: float) -> dict[str, object]:
        return {
            "rl_step": step,
            "memory_mib": {"trainer": memory},
            "files": {"trainer": 9},
            "directory_mib": 1.0,
        }

    found = {"row_bytes": 500.0, "report_mib": 1.0, "report_s": 2.0}
    steady, leaking = (
        [sample(step, 300 + leak * step) for step in range(0, 1000, 10)] for leak in (0.0, 0.1)
    )
    name = "growth of the trainer's memory, MiB"
    assert figures(steady, 1000, found)[name][0] == 0
    grown, most = figures(leaking, 1000, found)[name]
    assert grown == pytest.approx(59.5)
    assert grown > most
