"""A short soak; `make soak` makes the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import grown, soak


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_some_hundred_steps_leave_memory_files_directory_and_report_as_they_were(tmp_path: Path) -> None:
    found = soak(tmp_path, steps=400)
    assert found["steps"] == 400
    assert not found["grown"]


def test_what_grows_is_named() -> None:
    def sample(step: int, memory: float) -> dict[str, object]:
        return {"rl_step": step, "memory_mib": {"trainer": memory}, "files": {"trainer": 9}, "directory_mib": 1.0}

    found = {"row_bytes": 500.0, "report_mib": 1.0, "report_s": 2.0}
    steady, leaking = ([sample(step, 300 + leak * step) for step in range(0, 1000, 10)] for leak in (0.0, 0.1))
    assert grown(steady, 1000, found) == []
    assert grown(leaking, 1000, found) == ["memory of the trainer, MiB: 59.5, at most 12"]
