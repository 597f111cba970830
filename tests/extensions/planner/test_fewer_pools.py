"""A plan says when a pool of small GPUs costs more than it brings."""

from __future__ import annotations

import math
import shlex

import pytest

from digenrl import config as configuration
from digenrl.extensions.planner.bound import step_bound
from digenrl.extensions.planner.cli.plan import idle_pool_advice, plan_experiment
from digenrl.extensions.planner.fewer_pools import faster_without
from digenrl.extensions.planner.planner import PlanError
from digenrl.extensions.planner.reading import costing_of

SMALL = (
    "hardware=testbed_ac",
    "hardware.pools.a.count=2",
    "hardware.pools.a.per_node=2",
    "hardware.pools.a.memory_gib=24",
    "hardware.pools.c.count=8",
    "plan.simulated_steps=4",
)


@pytest.mark.heavy
def test_a_pool_that_slows_the_run_is_named_with_the_word_that_leaves_it_out() -> None:
    words = ["experiment=flux1_flowgrpo", *SMALL]
    made = plan_experiment(configuration.load(words, "plan"))
    assert made.fewer is not None
    assert made.fewer.pool == "a"
    (line,) = idle_pool_advice(made.fewer, made.winner)
    assert "with 2 GPUs fewer" in line
    fewer = plan_experiment(configuration.load([*words, *shlex.split(made.fewer.word)], "plan"))
    assert fewer.winner.step_s == pytest.approx(made.fewer.best.step_s)
    assert fewer.winner.step_s < made.winner.step_s
    assert made.plan_json()["step_s_without_pool"] == {"a": made.fewer.best.step_s}


@pytest.mark.heavy
def test_what_fits_without_a_pool_alone_is_said() -> None:
    words = ["experiment=hunyuanvideo_dancegrpo", *SMALL]
    with pytest.raises(PlanError, match=r"nothing fits: .*without the pool a: add '~hardware\.poo"):
        plan_experiment(configuration.load(words, "plan"))


def test_no_pool_is_left_out_that_helps_or_is_alone() -> None:
    for hardware in ("node_8xh100", "testbed_ac"):
        composed = configuration.load(["experiment=wan21_flowgrpo", f"hardware={hardware}"], "plan")
        costing = costing_of(composed)
        assert faster_without(costing, step_bound(costing), 3, asynchronous=False) is None
    assert math.isfinite(step_bound(costing))
