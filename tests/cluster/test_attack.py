"""An attacker on the machine of a real run, without its token: nothing is read, stopped, aborted or
redirected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.strategy.processes import assert_same_cells, completed, configured, run_cluster
from tests.strategy.test_equality import LIGHT, reference_of

# By default test_handshake.py tries what a stranger can do, without a run.
pytestmark = [pytest.mark.processes, pytest.mark.slow]
ATTACKER = Path(__file__).with_name("attacker.py")


def test_a_run_under_attack_computes_what_it_would_have_computed(tmp_path: Path) -> None:
    config = configured(
        *LIGHT, "schedule=full", "schedule.tsp.batch=1", "schedule.tag=false", "max_rl_steps=3"
    )
    wanted = reference_of(config)
    with subprocess.Popen(
        [sys.executable, ATTACKER, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as attacker:
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == "ready\n"
        try:
            cluster = run_cluster(tmp_path, 1, 2, config)
        finally:
            told, _ = attacker.communicate("", timeout=60)
    found, report = completed(cluster), json.loads(told)
    assert report["taken"] == []
    assert report["ports"] >= 2, (
        "the store, and links of ranks: how many it finds in time depends on the machine"
    )
    assert report["rounds"] >= 4, "the run was over before it was attacked"
    assert not [row for row in cluster.events() if row["kind"] in ("lost", "warning")]
    assert_same_cells(found, wanted)
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in wanted.weights.items())
