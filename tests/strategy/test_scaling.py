"""The scaling rule: one place scales, so shares, dropped groups and sharding leave the gradient
what it is.

Each trainer returns a sum over its cells divided by the update's own denominator; the Strategy
undoes Lightning's division by the accumulation count and the mean over ranks. All in fp64, where a
wrong factor cannot hide in rounding.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.strategy.processes import FP64, completed, configured, relative, run_cluster
from tests.strategy.reference import reference
from tests.strategy.test_equality import LIGHT

pytestmark = pytest.mark.processes

FORGETFUL = (
    "allow_targets=[tests]",
    "reward.rewards.judge_a.scorer._target_=tests.strategy.faults.Forgetful",
)
ALL_DIGITS = ("data.prompts_per_batch=10", "sampling.task_size=4", "sampling.steps=3")


@pytest.mark.parametrize(
    ("sharding", "shares"),
    [
        ("ddp", "[5,0]"),
        pytest.param("fsdp", "[3,1]", marks=pytest.mark.slow),
        pytest.param("ddp", "[3,1]", marks=pytest.mark.slow),
        pytest.param("fsdp", "[5,0]", marks=pytest.mark.slow),
    ],
)
def test_shares_leave_the_gradient_alone(tmp_path: Path, sharding: str, shares: str) -> None:
    """Micro-batch sizes differ, their number does not; a rank without cells joins with zero weight
    (I2, I3)."""
    words = [f"schedule.shares={shares}", "schedule.gap=2", f"parallel.sharding={sharding}"]
    config = configured(*LIGHT, *FP64, *words, "max_rl_steps=1")
    found, wanted = completed(run_cluster(tmp_path, 2, 1, config)), reference(config)
    for mine, theirs in zip(found.gradients, wanted.gradients, strict=True):
        assert relative(mine, theirs) <= 1e-12
    assert found.micro_batches[0] == found.micro_batches[1]
    assert found.cells.keys() == wanted.cells.keys()
    cells = [sum(ranks == [rank] for ranks in found.trained_by.values()) for rank in (0, 1)]
    assert sum(cells) == len(wanted.cells), "some cell was trained twice, or never (I2)"
    assert cells[0] == (3 * cells[1] if shares == "[3,1]" else len(wanted.cells))


@pytest.mark.parametrize(
    ("sharding", "shares"),
    [("ddp", "equal"), pytest.param("fsdp", "[3,1]", marks=pytest.mark.slow)],
)
def test_a_dropped_group_gives_no_gradient_and_keeps_the_denominator(
    tmp_path: Path, sharding: str, shares: str
) -> None:
    """I10 too: issued = trained + dropped."""
    words = [
        f"parallel.sharding={sharding}",
        f"schedule.shares={shares}",
        "schedule.gap=1",
        "schedule.tsp.shard=true",
    ]
    config = configured(*LIGHT, *FP64, *ALL_DIGITS, *FORGETFUL, *words, "max_rl_steps=1")
    cluster = run_cluster(tmp_path, 2, 1, config)
    found, wanted = completed(cluster), reference(config)
    for mine, theirs in zip(found.gradients, wanted.gradients, strict=True):
        assert relative(mine, theirs) <= 1e-12
    trained = {key[:3] for key in found.cells}
    missing = {key[:3] for key, cell in wanted.cells.items() if cell.reward.isnan()}
    assert len(missing) == 4, "one of ten prompts has no score"
    assert trained == {key[:3] for key in wanted.cells} - missing
    dropped = [row for row in cluster.events() if row["kind"] == "dropped"]
    assert {(row["step"], row["group"]) for row in dropped} == {key[:2] for key in missing}
    assert {row["reason"] for row in dropped} == {"missing_reward"}
    issued = sum(row["samples"] for row in cluster.spans("generate"))
    assert issued == len(trained) + sum(row["samples"] for row in dropped)
