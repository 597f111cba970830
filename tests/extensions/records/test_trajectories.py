"""The files of `record.trajectories`: whole steps alone, bounded, checked; and what a record cannot
support."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from digenrl.extensions.records.trajectories import Recorded, TrajectoryError, TrajectoryFiles

FACTS = {"rewards": ["judge"], "means": False, "final": False}


def record(
    run_dir: Path, steps: int, limit: float = float("inf"), rank: int = 0
) -> TrajectoryFiles:
    """`steps` steps of two messages of 100 bytes each."""
    files = TrajectoryFiles(run_dir, rank, limit)
    for step in range(steps):
        for byte in (2 * step, 2 * step + 1):
            files.take(step, [memoryview(bytes([byte]) * 60), memoryview(bytes([byte]) * 40)])
        files.finish(step, FACTS)
    return files


def test_what_is_written_is_read_and_what_is_damaged_is_refused(tmp_path: Path) -> None:
    files = record(tmp_path, 3)
    files.take(3, [memoryview(b"unfinished")])
    files.close()
    found = Recorded(tmp_path)
    assert found.steps == 3
    assert bytes(found.read(0, 1)) == bytes([2]) * 100 + bytes([3]) * 100
    assert not list(tmp_path.rglob("*.tmp"))
    path = tmp_path / "trajectories/rank-000/step-000001.cells"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(TrajectoryError, match=r"step-000001.cells is damaged.*max_rl_steps=1"):
        found.read(0, 1)


def test_a_step_that_a_resumed_run_repeats_replaces_the_first(tmp_path: Path) -> None:
    record(tmp_path, 3)
    again = TrajectoryFiles(tmp_path, 0)
    again.take(2, [memoryview(b"again")])
    again.finish(2, FACTS)
    assert bytes(Recorded(tmp_path).read(0, 2)) == b"again"
    assert Recorded(tmp_path).steps == 3


def test_the_record_ends_at_its_limit_with_whole_steps_and_says_so(tmp_path: Path) -> None:
    record(tmp_path, 5, limit=500)
    assert Recorded(tmp_path).steps == 2
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.cells")) == 400
    (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert event["kind"] == "trajectories"
    assert "record.trajectories_mib" in event["cause"]
    assert "ends after 2 RL steps, the run goes on" in event["cause"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"steps": 4}, "max_rl_steps = 4: .* holds 3 RL steps; set max_rl_steps=3 or less"),
        ({"means": True}, "algorithm.surrogate: needs the means"),
        ({"final": True}, "algorithm: needs clean latents, .* holds transitions"),
        ({"rewards": ["judge", "other"]}, "reward.rewards: other is not in .* the scores of judge"),
    ],
)
def test_what_the_record_lacks_is_refused_by_key(
    tmp_path: Path, asked: dict[str, object], said: str
) -> None:
    record(tmp_path, 3)
    wanted = {"steps": 3, "means": False, "final": False, "rewards": ["judge"]}
    Recorded(tmp_path).require(**wanted)  # type: ignore[arg-type]
    with pytest.raises(TrajectoryError, match=said):
        Recorded(tmp_path).require(**wanted | asked)  # type: ignore[arg-type]


def test_a_run_without_a_record_or_with_a_part_of_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrajectoryError, match=r"record\.trajectories=true"):
        Recorded(tmp_path).require(1, False, False, [])
    record(tmp_path, 3)
    record(tmp_path, 1, rank=1)
    assert Recorded(tmp_path).steps == 1, "the steps that every trainer has"
