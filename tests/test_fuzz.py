"""Damaged and hostile inputs: a few by default, ten thousand in the slow suite (tests/fuzz.py)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("n", "seed"), [(80, "default"), pytest.param(10_000, "slow", marks=pytest.mark.slow)]
)
@pytest.mark.timeout(1800)
def test_every_input_is_taken_or_refused(n: int, seed: str) -> None:
    """In a process of its own, because an audit hook stays."""
    command = [sys.executable, "-m", "tests.fuzz", f"n={n}", f"seed={seed}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "0"
