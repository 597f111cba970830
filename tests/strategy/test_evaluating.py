"""Evaluation on rollouts gives, bit by bit, what evaluation on trainers gives; trainers then draw
nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from digenrl import config as configuration
from digenrl import run
from digenrl.advisor import PlainAdvisor
from digenrl.cluster.world import World
from digenrl.settle import trainers_must_evaluate, with_allocation
from tests.strategy.processes import TINY, Cluster, Job, completed, run_cluster, run_series
from tests.training import Train, fault, watch

EVALUATION = (
    *(word for word in TINY if word != "~callbacks.evaluation"),
    "callbacks.evaluation.samples_per_prompt=2",
    "callbacks.evaluation.max_prompts=5",
    "callbacks.evaluation.every=1",
)
AVERAGE = ("+algorithm/ema=default", "algorithm.ema.every=1", "algorithm.optimizer.lr=0.03")
ASYNC = ("schedule.async_steps=1", "schedule.gap=1", "schedule.stale_fraction=0.5")
ROLLOUTS, TRAINERS = "allocation.evaluation=rollouts", "allocation.evaluation=trainers"

Numbers = list[dict[str, Any]]


def numbers(rows: list[dict[str, Any]]) -> Numbers:
    """The eval lines without their times."""
    return [
        {key: row[key] for key in row if key != "time"} for row in rows if row["kind"] == "eval"
    ]


def samples(run_dir: Path) -> dict[str, np.ndarray[Any, Any]]:
    """What the evaluations kept, by file and array."""
    files = sorted(run_dir.glob("samples/eval-*.npz"))
    return {f"{file.name}/{name}": array for file in files for name, array in np.load(file).items()}


def assert_same(found: Path, wanted: Path) -> None:
    one, other = samples(found), samples(wanted)
    assert one.keys() == other.keys()
    assert len(one) > 3
    for name in one:
        assert np.array_equal(one[name], other[name]), name


def draws_nothing(rank: run.Rank, world: World) -> None:
    """A trainer that evaluates or decodes, or builds a reward model, ends the run."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a trainer evaluates")

    if world.is_trainer:
        engine = rank.strategy.engine
        engine.evaluate_prompts = engine.policy.codec.decode = engine._rewards.score = refuse  # type: ignore[method-assign, assignment]


def loaded(*words: str) -> Any:
    return configuration.load([*EVALUATION, *words]).settings


@pytest.mark.processes
def test_rollouts_evaluate_what_trainers_would(tmp_path: Path) -> None:
    """One of each: the same lines of metrics.jsonl before and after a step; the timeline says who
    worked. Before it a moving average is the version itself, after it the average is published;
    without one, numbers are others."""
    fast = (
        "max_rl_steps=1",
        "data.prompts_per_batch=2",
        "callbacks.evaluation.max_prompts=3",
    )
    jobs = [
        Job("rollouts", loaded(*fast, *AVERAGE), draws_nothing),
        Job("trainers", loaded(*fast, *AVERAGE, TRAINERS)),
        Job("plain", loaded(*fast, AVERAGE[-1]), draws_nothing),
    ]
    found: dict[str, Numbers] = {}
    pictures: dict[str, dict[str, Any]] = {}
    for job, cluster in run_series(tmp_path, 1, 1, jobs):
        completed(cluster)
        found[job.name], pictures[job.name] = numbers(cluster.metrics()), samples(cluster.run_dir)
        drawn = [
            row["role"] for row in cluster.spans("eval") if "piece" in row or job.name == "trainers"
        ]
        assert drawn == (["trainer"] * 2 if job.name == "trainers" else ["rollout"] * 6)
        assert any(row.get("cause") == "evaluation" for row in cluster.spans("wait")) == (
            job.name != "trainers"
        )
        published = [row["version"] for row in cluster.spans("publish") if row.get("evaluated")]
        assert published == ([1] if job.name == "rollouts" else []), job.name
    assert found["rollouts"] == found["trainers"]
    assert [line["rl_step"] for line in found["rollouts"]] == [0, 1]
    assert pictures["rollouts"].keys() == pictures["trainers"].keys()
    assert all(
        np.array_equal(array, pictures["trainers"][name])
        for name, array in pictures["rollouts"].items()
    )
    before, after = ("eval-0.npz/media", "eval-1.npz/media")
    assert np.array_equal(pictures["plain"][before], pictures["rollouts"][before])
    assert not np.array_equal(pictures["plain"][after], pictures["rollouts"][after])


@pytest.mark.parametrize(
    ("experiment", "words", "rollouts", "cause"),
    [
        ("digits_flowgrpo", (), 0, "no rank only generates"),
        (
            "digits_flowgrpo",
            ("+callbacks.more=${callbacks.evaluation}",),
            1,
            "there are 2 evaluations",
        ),
    ],
)
def test_what_rollouts_cannot_evaluate_is_said_and_refused(
    experiment: str, words: tuple[str, ...], rollouts: int, cause: str
) -> None:
    composed = configuration.load([f"experiment={experiment}", *words, ROLLOUTS])
    assert cause in str(trainers_must_evaluate(composed.settings, rollouts))
    with pytest.raises(
        ValueError, match=rf"allocation.evaluation = rollouts: cannot be, because .*{cause}.*=auto"
    ):
        with_allocation(composed, 1, rollouts, PlainAdvisor())


# ---- real commands


def ended(train: Train) -> Train:
    watch(train)
    assert train.finish() == 0, train.stderr
    return train


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    [
        ("allocation.trainers=1", "allocation.rollouts=2"),
        ("allocation.trainers=1", "allocation.rollouts=2", *ASYNC),
        ("allocation.trainers=2", "allocation.rollouts=1", "schedule=gap_tsp_tag"),
        ("allocation.trainers=2", "allocation.rollouts=2", "parallel.sharding=fsdp"),
        ("allocation.trainers=2", "allocation.rollouts=1", "algorithm.updates_per_batch=2"),
        ("allocation.trainers=2", "allocation.rollouts=2", "parallel.sharding=fsdp", *AVERAGE),
        (
            "allocation.trainers=1",
            "allocation.rollouts=2",
            *ASYNC,
            *AVERAGE,
            "network.publication=broadcast",
        ),
        ("experiment=digits_nft", "allocation.trainers=1", "allocation.rollouts=2"),
        (
            "experiment=digits_nft",
            "allocation.trainers=2",
            "allocation.rollouts=2",
            "parallel.sharding=fsdp",
            *AVERAGE,
        ),
    ],
)
def test_the_same_numbers_in_every_schedule(running: Any, words: tuple[str, ...]) -> None:
    own, theirs = (
        ended(running(*words, where, tiny=EVALUATION, fork=True)) for where in (ROLLOUTS, TRAINERS)
    )
    assert numbers(own.rows("metrics.jsonl")) == numbers(theirs.rows("metrics.jsonl"))
    assert_same(own.run_dir, theirs.run_dir)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("schedule", [(), ASYNC, AVERAGE], ids=["sync", "async", "average"])
def test_a_rollout_that_dies_in_the_middle_changes_no_number(
    running: Any, schedule: tuple[str, ...]
) -> None:
    """A rollout dies at its second piece, and the other rollout makes the rest."""
    words = ("allocation.trainers=1", "allocation.rollouts=2", *schedule)
    dies = ended(running(*words, *fault("evaluate", 2, "kill", call=2), tiny=EVALUATION, fork=True))
    whole = ended(running(*words, tiny=EVALUATION, fork=True))
    assert len(dies.summary["lost"]) == 1
    assert numbers(dies.rows("metrics.jsonl")) == numbers(whole.rows("metrics.jsonl"))
    assert_same(dies.run_dir, whole.run_dir)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    [("schedule=gap_tsp_tag",), ("parallel.sharding=fsdp",), ("schedule=gap_tsp_tag", *AVERAGE)],
    ids=["ddp", "fsdp", "average"],
)
def test_trainers_make_the_pieces_that_no_rollout_is_left_for(
    running: Any, words: tuple[str, ...]
) -> None:
    """The only rollout dies at its fourth piece of the second evaluation; trainers end that."""
    words = ("allocation.trainers=2", "allocation.rollouts=1", "allocation.patience_s=5", *words)
    words = (
        "callbacks.evaluation.samples_per_prompt=16",
        *words,
    )  # trainers hold all tasks long before
    dies = running(*words, *fault("evaluate", 2, "kill", call=9), tiny=EVALUATION, fork=True)
    whole = ended(running(*words, tiny=EVALUATION, fork=True))
    watch(dies)
    own, theirs = numbers(dies.rows("metrics.jsonl")), numbers(whole.rows("metrics.jsonl"))
    assert [line["rl_step"] for line in own][:2] == [0, 1], dies.stderr
    assert own == theirs[: len(own)]


@pytest.mark.slow
@pytest.mark.processes
def test_an_evaluation_that_a_stop_has_cut_off_is_made_up_for(tmp_path: Path) -> None:
    """The run is resumed from step 1, whose evaluation was not written yet."""
    config = loaded("max_rl_steps=2", "callbacks.checkpoint.every=1")
    whole = run_cluster(tmp_path, 1, 1, config)
    completed(whole)
    wanted, kept = numbers(whole.metrics()), [line for line in lines(whole) if '"eval"' not in line]
    (tmp_path / "metrics.jsonl").write_text("".join(kept))
    for path in (tmp_path / "checkpoints").glob("step-000002"):
        path.rename(tmp_path / "later")
    (tmp_path / "checkpoints" / "last").unlink(missing_ok=True)
    again = run_cluster(tmp_path, 1, 1, config, resume=True)
    completed(again)
    assert numbers(again.metrics()) == wanted[1:]


def lines(cluster: Cluster) -> list[str]:
    return (cluster.run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
