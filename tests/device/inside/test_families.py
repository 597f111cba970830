"""Every family's tiny build takes two RL steps on the device."""

from __future__ import annotations

import math

import pytest

import digenrl
from tests.models.families import experiments

pytestmark = pytest.mark.slow
OTHERS = ("digits", "scenes", "mixture", "ocr", "sweep", "ablation")
EXPERIMENTS = [name for name in experiments() if not name.startswith(OTHERS)]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_two_steps(experiment: str) -> None:
    loop = digenrl.rl_loop(f"experiment={experiment}", "hardware=cpu_tiny")
    try:
        for _ in range(2):
            found = loop.train(loop.generate())
            assert all(math.isfinite(value) for name, value in found.items() if "grad" in name)
    finally:
        loop.close()
    assert {
        parameter.device.type for parameter in loop.policy.adapter.trained_parameters().values()
    } == {"strict"}
