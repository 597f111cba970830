"""The policy that sleeps: what it trains, and how long it takes."""

from __future__ import annotations

import time

import pytest
import torch

from digenrl.extensions.planner.emulate import Durations
from digenrl.extensions.planner.emulated import LATENT, EmulatedPolicy

DURATIONS = Durations(task_size=2, encode=0.01, step=0.2, decode=0.01, cell=0.3)


@pytest.mark.parametrize("adapter", [False, True])
def test_an_adapter_trains_a_part_of_the_weights(adapter: bool) -> None:
    """The Strategy keeps a copy of a published adapter, never of a whole model: the emulation must
    tell them apart."""
    policy = EmulatedPolicy(DURATIONS, adapter)
    trained = sum(parameter.numel() for parameter in policy.trained_parameters().values())
    whole = sum(parameter.numel() for parameter in policy.transformer.parameters())
    assert (trained < whole) == adapter


def test_sleeps_are_in_proportion_to_the_rows() -> None:
    policy = EmulatedPolicy(DURATIONS)
    began = time.monotonic()
    with torch.no_grad():
        policy.predict(torch.zeros(1, *LATENT), torch.zeros(1), {})
    step = time.monotonic() - began
    policy.predict(torch.zeros(2, *LATENT), torch.zeros(2), {}).sum().backward()
    cell = time.monotonic() - began - step
    assert step >= 0.1
    assert cell >= 0.3
