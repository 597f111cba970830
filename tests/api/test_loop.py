"""RL steps in this process: what they give is what a run gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import digenrl
from digenrl import config as configuration
from tests.strategy.processes import TINY
from tests.strategy.reference import reference

WORDS = (*TINY, "data.prompts_per_batch=2")


@pytest.mark.heavy
def test_two_steps_equal_the_reference_loop() -> None:
    loop, expected = digenrl.rl_loop(*WORDS), reference(configuration.load(WORDS).settings)
    for _ in range(2):
        made = loop.generate()
        metrics = loop.train(made)
    loop.close()
    assert metrics["reward"] == pytest.approx(
        float(torch.stack([t.rewards["judge_a"].mean() for t in made]).mean())
    )
    for name, parameter in loop.policy.adapter.trained_parameters().items():
        assert torch.allclose(parameter, expected.weights[name], rtol=0, atol=1e-7), name


@pytest.mark.heavy
def test_what_is_missing_is_said_and_what_is_changed_counts() -> None:
    loop = digenrl.rl_loop(*WORDS)
    made = loop.generate()
    with pytest.raises(ValueError, match="groups \\[0\\] of RL step 0 are not complete"):
        loop.train(made[1:])
    constant = [
        replace(each, rewards={name: torch.ones_like(r) for name, r in each.rewards.items()})
        for each in made
    ]
    metrics = loop.train(constant)
    assert (metrics["zero_variance_share"], metrics["grad_norm"]) == (1.0, 0.0)
    loop.close()


@pytest.mark.heavy
def test_what_it_advises_it_takes() -> None:
    words = ["experiment=flux1_flowgrpo"]
    with pytest.raises(ValueError, match=r"needs .* GiB .* hardware\.build=tiny") as refused:
        digenrl.rl_loop(*words)
    assert "allocation." not in str(refused.value)
    digenrl.rl_loop(*words, "hardware.build=tiny").close()


def test_a_schedule_has_no_place_in_it() -> None:
    with pytest.raises(ValueError, match="schedule=full: the loop is one rank"):
        digenrl.rl_loop("experiment=digits_flowgrpo", "schedule=full")
