"""The record of a scheduler gives every decision again (I13), over random virtual runs."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.extensions.planner.virtual_cluster import Cluster, Disturbance
from digenrl.extensions.planner.virtual_run import simulate_run
from digenrl.record.decisions import DecisionLog
from digenrl.schedule import ScheduleSpec
from digenrl.schedule.ranks import Roles
from digenrl.schedule.scheduler import record_header
from tests.extensions.planner.test_virtual_run import clusters, specs
from tests.schedule.replaying import replay


@pytest.mark.heavy
@settings(max_examples=60, deadline=None)
@given(specs(), clusters(least_rollouts=1), st.floats(0.0, 0.5), st.integers(0, 99))
def test_I13_a_virtual_runs_record_gives_every_decision_again(
    spec: ScheduleSpec, cluster: Cluster, jitter: float, seed: int
) -> None:
    """Whole, and as a rank writes it into its file, which leaves out what changes nothing."""
    rows: list[dict[str, Any]] = []
    simulate_run(spec, cluster, 6, Disturbance(jitter, seed, {0: 2.0}), record=rows.append)
    roles = Roles(
        len(cluster.trainers),
        len(cluster.rollouts),
        cluster.lockstep,
        cluster.static_claims,
    )
    assert any("decision" in row for row in rows)
    record = [record_header(spec, roles, 5), *rows]
    assert replay(json.loads(json.dumps(record))) == []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rank-000.jsonl"
        log = DecisionLog(path, record[0])
        for row in json.loads(json.dumps(rows)):
            log(row)
        log.close()
        written = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(written) <= len(record)
    assert replay(written) == []
