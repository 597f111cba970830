"""Groups that teach nothing: dropped, or replaced by others, with the same gradient in every
schedule."""

from __future__ import annotations

from pathlib import Path

import pytest

from digenrl.report.build import finish_report
from digenrl.report.read_run import read_run
from tests.strategy.processes import FP64, completed, configured, relative, run_cluster
from tests.strategy.test_equality import LIGHT, reference_of

pytestmark = pytest.mark.processes

SCORER = (
    "allow_targets=[tests]",
    "reward.rewards.judge_a.scorer._target_=tests.strategy.faults.HalfIndifferent",
)
OPTIONS = {
    "drop": ("data.zero_variance_groups=drop",),
    "oversample": ("data.oversample=4",),
    "both": (
        "data.oversample=2",
        "data.zero_variance_groups=drop",
        "algorithm.updates_per_batch=2",
    ),
    "both-kl": ("data.oversample=2", "data.zero_variance_groups=drop", "algorithm.kl_weight=0.05"),
}
SCHEDULES = {
    "sync": (1, 1, ("schedule=sync",)),
    "colocated": (2, 0, ("schedule=colocated", "schedule.gap=0")),
    "gap": (2, 1, ("schedule.gap=1", "schedule.tsp.shard=true")),
    "full": (2, 1, ("schedule=full", "schedule.async_steps=0")),
    "async": (1, 2, ("schedule=full",)),
    "fsdp": (2, 1, ("schedule=gap_tsp", "parallel.sharding=fsdp")),
}
USUAL = {("both", "gap")}


@pytest.mark.parametrize(
    ("option", "schedule"),
    [
        pytest.param(
            option, schedule, marks=() if (option, schedule) in USUAL else pytest.mark.slow
        )
        for option in OPTIONS
        for schedule in SCHEDULES
    ],
)
def test_every_schedule_trains_the_same_groups_with_the_same_gradient(
    tmp_path: Path, option: str, schedule: str
) -> None:
    trainers, rollouts, words = SCHEDULES[schedule]
    config = configured(*LIGHT, *FP64, *SCORER, *OPTIONS[option], *words)
    cluster = run_cluster(tmp_path, trainers, rollouts, config)
    found, wanted = completed(cluster), reference_of(config)
    assert len(found.gradients) == len(wanted.gradients)
    for mine, theirs in zip(found.gradients, wanted.gradients, strict=True):
        assert relative(mine, theirs) <= 1e-12
    assert relative(found.weights, wanted.weights) <= 1e-12
    groups = finish_report(tmp_path, "completed", None)["groups"]
    data = config.data
    assert sum(groups.values()) == config.max_rl_steps * (data.prompts_per_batch + data.oversample)
    assert groups["trained"] == len({key[:2] for key in found.trained_by})
    assert groups["zero_variance"] > 0, "the options had something to do"
    assert groups["missing_reward"] == 0
    assert (groups["surplus"] > 0) == (data.oversample > 0)
    spans = read_run(tmp_path).spans
    generated = {
        (span.step, span.args["group"]) for span in spans if span.stage in ("generate", "lend")
    }
    assert len(generated) == sum(groups.values())
