"""Sharded trainers move together, and wait for each other longer than a collective may last."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from digenrl import run
from digenrl.cluster.world import World
from tests.strategy.processes import completed, configured, run_cluster
from tests.strategy.test_equality import LIGHT

pytestmark = pytest.mark.processes

LIMIT_S = 2.0


def impatient_collectives_and_slow_rollouts(rank: run.Rank, world: World) -> None:
    """Collectives last at most `LIMIT_S` once training begins; the first fragment takes twice as
    long to generate."""
    strategy = rank.strategy
    begin, advance = strategy.begin_training, strategy.engine.take_step

    def limited(*args: Any) -> None:
        begin(*args)
        if dist.get_world_size() > 1:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT_S))

    def slow(generation: Any) -> Any:
        if generation.task.group == 0 and generation.task.step == 0:
            time.sleep(LIMIT_S / 2)
        return advance(generation)

    strategy.begin_training = limited  # type: ignore[method-assign]
    strategy.on_bubble = lambda board, pending: 0  # type: ignore[method-assign]  # nobody lends: all wait
    if not world.is_trainer:
        strategy.engine.take_step = slow  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_wait_in_lockstep_survives_the_limit_of_a_collective(tmp_path: Path) -> None:
    words = (
        "schedule=gap_tsp_tag",
        "parallel.sharding=fsdp",
        "max_rl_steps=1",
        "data.prompts_per_batch=2",
    )
    config = configured(*LIGHT, *words)
    cluster = run_cluster(
        tmp_path, 2, 1, config, after_build=impatient_collectives_and_slow_rollouts
    )
    completed(cluster)
    waits = [row["end"] - row["start"] for row in cluster.spans("wait") if row["rank"] == 0]
    assert max(waits) > 1.5 * LIMIT_S, "nobody waited longer than a collective may"


@pytest.mark.parametrize(
    ("words", "trainers", "unequal"),
    [
        ((), 2, True),
        pytest.param((), 2, False, marks=pytest.mark.slow),
        pytest.param(("experiment=digits_nft",), 2, True, marks=pytest.mark.slow),
        pytest.param(
            ("experiment=digits_nft", "parallel.sharding=hsdp", "parallel.shard_group=1"),
            2,
            True,
            marks=pytest.mark.slow,
        ),
        pytest.param(("parallel.sharding=hsdp", "parallel.shard_group=1"), 2, True),
        pytest.param(
            ("parallel.sharding=hsdp", "parallel.shard_group=2"), 4, True, marks=pytest.mark.slow
        ),
    ],
    ids=["ddp", "equal-gpus", "nft", "nft-hsdp", "hsdp", "hsdp-2x2"],
)
def test_replicas_on_unequal_gpus_take_the_first_ones_weights(
    tmp_path: Path, words: tuple[str, ...], trainers: int, unequal: bool
) -> None:
    """On equal GPUs a last bit that differs after an update ends the run. On unequal GPUs the
    difference is levelled out: in the trained weights and in weights published in their place
    (NFT), for replicas and for nodes that hold a copy each."""

    def drift(rank: run.Rank, world: World) -> None:
        strategy = rank.strategy
        strategy.rank_setup = replace(strategy.rank_setup, unequal_gpus=unequal)
        step = strategy.optimizer_step

        def rounds_otherwise(*args: Any, **kwargs: Any) -> Any:
            parameter = next(iter(strategy.engine.policy.adapter.trained_parameters().values()))
            if world.rank == trainers - 1:
                own: Any = getattr(parameter, "to_local", lambda: parameter.data)()
                own.detach().view(-1)[0].add_(1e-6)
            return step(*args, **kwargs)

        strategy.optimizer_step = rounds_otherwise  # type: ignore[method-assign]

    config = configured(*LIGHT, "max_rl_steps=1", *words)
    cluster = run_cluster(tmp_path, trainers, 1, config, after_build=drift)
    if unequal:
        completed(cluster)
    else:
        assert "different weights at version 1" in str(cluster.outcome.cause)
