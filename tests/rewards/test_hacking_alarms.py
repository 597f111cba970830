from __future__ import annotations

import math

import torch

from digenrl.rewards import hacking_alarms as alarms


def test_a_canary_that_moves_is_an_alarm():
    expected = torch.tensor([0.5, 1.0, math.nan])
    assert alarms.canary("r", torch.tensor([0.5001, 1.0, 0.3]), expected) is None
    found = alarms.canary("r", torch.tensor([0.5, 0.25, 0.3]), expected)
    assert found.value == 0.75
    assert "a picture 0.25 that it scored 1" in found.message
    assert (
        alarms.canary("r", torch.full((3,), math.nan), expected) is None
    )  # counted as missing instead
