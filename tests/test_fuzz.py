"""Damaged and hostile inputs: a few by default, ten thousand in the slow suite (tests/fuzz.py)."""

from __future__ import annotations

import multiprocessing
import sys

import pytest

from tests import fuzz


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("n", "seed"), [(40, "default"), pytest.param(10_000, "slow", marks=pytest.mark.slow)]
)
@pytest.mark.timeout(1800)
def test_every_input_is_taken_or_refused(
    n: int, seed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a fork, because an audit hook stays."""
    process = multiprocessing.get_context("fork").Process(
        target=lambda: sys.exit(fuzz.main([f"n={n}", f"seed={seed}"]))
    )
    process.start()
    process.join()
    told = capfd.readouterr()
    assert process.exitcode == 0, told.err[-4000:]
    assert told.out.splitlines()[-1] == "0"
