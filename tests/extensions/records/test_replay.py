"""`record.trajectories` and `replay`: what trainers consumed is trained again, with nothing
generated."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from digenrl import config as configuration
from digenrl.config import ConfigError
from tests.strategy.processes import FP64, SGD, TINY, completed, configured, relative, run_cluster
from tests.strategy.reference import reference
from tests.training import SMALL, Train, commands

pytestmark = pytest.mark.processes

RECORD = ("record.trajectories=true",)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Any]:
    """Starts train commands, and leaves none behind."""
    yield from commands(tmp_path)


def digests(train: Train) -> dict[int, str]:
    """Version -> digest of its weights."""
    return {
        row["version"]: row["digest"]
        for row in train.rows("events.jsonl")
        if row["kind"] == "publish"
    }


def done(train: Train) -> Train:
    assert train.finish() == 0, train.stderr
    return train


def test_a_replay_gives_every_version_again_bit_by_bit(running: Any) -> None:
    """Recorded with everything on: asynchrony, lending."""
    first = done(running(*SMALL, *RECORD, "schedule=full", "max_rl_steps=3", fork=True))
    assert "MiB an RL step" in first.stderr + first.stdout
    again = done(running(f"replay={first.run_dir}", tiny=(), fork=True))
    assert again.stdout == f"{again.run_dir}\n"
    assert digests(again) == digests(first)
    assert len(digests(first)) == 4
    policy = "checkpoints/last/policy.safetensors"
    assert (again.run_dir / policy).read_bytes() == (first.run_dir / policy).read_bytes()
    assert again.summary["world"] == {"trainer": 1, "rollout": 0}
    assert again.summary["first_ratio_max_dev"] == first.summary["first_ratio_max_dev"]
    assert not {row["stage"] for row in again.rows("spans/rank-000.jsonl")} & {
        "generate",
        "lend",
        "score",
        "decode",
    }


@pytest.mark.slow
def test_another_surrogate_on_a_record_gives_other_weights(running: Any) -> None:
    first = done(running(*SMALL, *RECORD, fork=True))
    study = (f"replay={first.run_dir}", "algorithm/surrogate=cispo", "algorithm.optimizer.lr=1e-3")
    other = done(running(*study, tiny=(), fork=True))
    found, recorded = digests(other), digests(first)
    assert found[0] == recorded[0]
    assert not set(list(found.values())[1:]) & set(recorded.values())


def test_what_a_record_cannot_support_is_refused_by_key(tmp_path: Path) -> None:
    stored = configuration.load([*TINY, f"hydra.run.dir={tmp_path}/run-0"])
    run = configuration.prepare_run_dir(stored)
    words = (
        "seed=1",
        "sampling.steps=5",
        "sampling.task_size=4",
        "data.group_size=8",
        "model.lora.rank=2",
        "algorithm.sde.noise_level=0.3",
        "algorithm/train_steps=random_window",
        "schedule.async_steps=1",
    )
    with pytest.raises(
        ConfigError, match="the record holds what was sampled with the stored value"
    ) as refused:
        configuration.load([f"replay={run}", *words])
    for word in words:
        key = word.partition("=")[0].replace("/", ".")
        assert f"{key} = " in str(refused.value) or f"{key}._target_ = " in str(refused.value), key
    for words, said in (
        (["allocation.rollouts=1"], "allocation.rollouts = 1 with replay"),
        ([*RECORD], "record.trajectories = true with replay"),
        (["experiment=digits_nft"], "a replay keeps its experiment"),
        ([f"resume={run}"], "name one of them"),
    ):
        with pytest.raises(ConfigError, match=said):
            configuration.load([f"replay={run}", *words])
    study = [
        "algorithm.kl_weight=0.5",
        "schedule.tsp.batch=all",
        "reward.rewards.judge_a.weight=2.0",
    ]
    composed = configuration.load([f"replay={run}", "algorithm/surrogate=topr", *study])
    assert composed.run_dir != run
    assert not composed.resumed
    assert composed.config.algorithm.surrogate["_target_"].endswith("TOPR")


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_several_trainers_replay_bit_by_bit_and_one_trains_their_record_to_rounding(
    tmp_path: Path, sharding: str
) -> None:
    words = (
        *FP64,
        *SGD,
        f"parallel.sharding={sharding}",
        "schedule.gap=1",
        "schedule.tsp.shard=true",
    )
    config = configured(*words, *RECORD)
    first = completed(run_cluster(tmp_path / "first", 2, 1, config))
    configuration.store_config(config, tmp_path / "first")
    replay = configuration.load([f"replay={tmp_path / 'first'}"]).config
    again = completed(run_cluster(tmp_path / "again", 2, 0, replay))
    assert relative(again.weights, first.weights) == 0.0
    replay = configuration.load([f"replay={tmp_path / 'first'}", "parallel.sharding=ddp"]).config
    alone = completed(run_cluster(tmp_path / "alone", 1, 0, replay))
    assert relative(alone.weights, first.weights) <= 1e-12


@pytest.mark.slow
@pytest.mark.alone
def test_a_replay_takes_less_processor_time_than_its_run(running: Any) -> None:
    """It spares what the rollout did; training, which is most of the work on digits, stays."""
    quiet = ("logger=none", "callbacks=default", "~callbacks.evaluation")
    began = processor_seconds()
    first = done(running("experiment=digits_flowgrpo", "max_rl_steps=20", *quiet, *RECORD, tiny=()))
    recorded = processor_seconds()
    done(running(f"replay={first.run_dir}", tiny=()))
    assert recorded - began >= 1.4 * (processor_seconds() - recorded)


def processor_seconds() -> float:
    """Of all processes that this one has started and seen end."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
def test_updates_share_the_samples_of_a_record_that_was_made_for_whole_groups(
    tmp_path: Path,
) -> None:
    words = (*FP64, *SGD, "algorithm.updates_per_batch=2", "max_rl_steps=1", "schedule.gap=1")
    config, within = configured(*words, *RECORD), "data.updates_split=samples"
    completed(run_cluster(tmp_path / "first", 2, 1, config))
    configuration.store_config(config, tmp_path / "first")
    replay = configuration.load([f"replay={tmp_path / 'first'}", within]).config
    found = completed(run_cluster(tmp_path / "again", 1, 0, replay))
    wanted = reference(configured(*words, within))
    assert len(found.gradients) == len(wanted.gradients) == 2
    assert all(
        relative(mine, theirs) <= 1e-12
        for mine, theirs in zip(found.gradients, wanted.gradients, strict=True)
    )
