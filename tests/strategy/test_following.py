"""Rollouts that generate together make the samples that one makes alone, and go together."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from digenrl import config as configuration
from tests.strategy.processes import FP64, SGD, Job, Record, completed, run_cluster, run_series
from tests.strategy.test_context import FAMILIES, FEW, assert_equal
from tests.strategy.test_losses import CAUSES, inject, lost
from tests.training import commands, fault

pytestmark = pytest.mark.processes
running = pytest.fixture(commands)

SMALL = ("hardware=cpu_tiny", "logger=none", "reward=video_quality", "max_rl_steps=2")
ALONE = ("~callbacks.evaluation",)
EVALUATED = (
    "allocation.evaluation=rollouts",
    *(f"callbacks.evaluation.{key}" for key in ("every=1", "max_prompts=3", "samples_per_prompt=2")),
)


def configured(family: str, together: int, *words: str) -> DictConfig:
    words = (*SMALL, *SGD, *FP64, *FEW, *FAMILIES[family], *words)
    return configuration.load([*words, f"parallel.rollout_context={together}", "allocation.rollouts=4"]).config


def test_a_group_makes_the_samples_of_one_rollout(tmp_path: Path) -> None:
    """Wan with classifier-free guidance; the second step needs weights that both ranks have adopted. The leader alone
    decodes."""
    found: dict[int, Record] = {}
    jobs = [Job(str(together), configured("wan", together, *ALONE)) for together in (1, 2)]
    for job, cluster in run_series(tmp_path, 1, 2, jobs):
        found[int(job.name)] = completed(cluster)
        assert {row["rank"] for row in cluster.spans("generate")} == {1, 2}
        if job.name == "2":
            assert {row["rank"] for row in cluster.spans("decode")} == {1}
            adopted = {(row["rank"], row["version"]): row["digest"] for row in cluster.spans("adopt")}
            for version in (0, 1):
                assert adopted[1, version] == adopted[2, version]
    assert_equal(found[2], found[1], 1)


@pytest.mark.slow
@pytest.mark.parametrize("average", ["", "+algorithm.ema={_target_: digenrl.algorithms.copies.Ema, decay: 0.5}"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_groups_lend_and_evaluate_as_four_rollouts(tmp_path: Path, family: str, average: str) -> None:
    """One step old weights, lending trainers, loans that end in mid-trajectory, evaluation at every step, also
    of a moving average, which followers need for it alone."""
    words = ("schedule=full", "data.prompts_per_batch=2", "sampling.task_size=1", *EVALUATED, *filter(None, [average]))
    found: dict[int, Record] = {}
    drawn: dict[int, list[dict[str, Any]]] = {}
    jobs = [Job(str(together), configured(family, together, *words)) for together in (1, 2)]
    for job, cluster in run_series(tmp_path, 1, 4, jobs):
        found[int(job.name)] = completed(cluster)
        drawn[int(job.name)] = [row for row in cluster.metrics() if row["kind"] == "eval"]
        assert {row["rank"] for row in cluster.spans("eval") if "piece" in row} <= {1, 2, 3, 4}
    assert_equal(found[2], found[1], 1)
    assert len(drawn[2]) == len(drawn[1]) == 3
    for mine, theirs in zip(drawn[2], drawn[1], strict=True):
        for name in theirs.keys() - {"time"}:
            value = theirs[name]
            assert mine[name] == value or math.isclose(mine[name], value, rel_tol=1e-5, abs_tol=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "action"), [(2, "kill"), (2, "raise"), (1, "kill"), (2, "stop")])
def test_a_group_goes_with_any_of_its_ranks(tmp_path: Path, rank: int, action: str) -> None:
    """In the third forward, which all of them are in; the other group makes its task anew."""
    words = ("max_rl_steps=1", "sampling.task_size=1", *ALONE)
    wanted = completed(run_cluster(tmp_path / "alone", 1, 1, configured("wan", 1, *words)))
    before = inject(("forward", rank, action, 3))
    cluster = run_cluster(tmp_path / "together", 1, 4, configured("wan", 2, *words), before=before)
    assert_equal(completed(cluster), wanted, 1)
    (event,) = lost(cluster)
    assert f"rank {rank} (rollout) {CAUSES[action]}" in str(event["cause"])
    assert len(event["reissued"]) == 1  # type: ignore[arg-type]
    assert {row["rank"] for row in cluster.spans("decode")} <= {1, 3}


@pytest.mark.slow
def test_a_follower_that_is_asked_to_go_takes_its_group_along(tmp_path: Path) -> None:
    """The leader hands its task over to the other group."""
    words = ("max_rl_steps=1", "sampling.task_size=1", *ALONE)
    before = inject(("forward", 2, "go", 3))
    cluster = run_cluster(tmp_path, 1, 4, configured("wan", 2, *words), before=before)
    completed(cluster)
    (event,) = [row for row in cluster.events() if row["kind"] == "left"]
    assert (event["rank"], event["reissued"], lost(cluster)) == (1, [], [])


@pytest.mark.slow
def test_a_train_command_goes_on_without_a_group(running: Any) -> None:
    words = (*SMALL, *FEW, *FAMILIES["wan"], *ALONE, "allocation.rollouts=4", "parallel.rollout_context=2")
    train = running(*words, *fault("forward", 4, "kill", call=3), tiny=(), fork=True)
    assert train.finish() == 0, train.stderr
    assert "1 trainer + 4 rollouts in groups of 2" in train.stderr
    (lost,) = train.summary["lost"]
    assert "rank 4 (rollout) was killed by signal 9" in lost
    assert train.summary["rl_steps"] == 2
