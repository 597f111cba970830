"""A rollout rank may die alone: its tasks go back, and the run computes what it would have computed
(I1, I11)."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from digenrl import run
from digenrl.cluster.launcher import Launch, launch_ranks
from digenrl.cluster.world import Session, World
from digenrl.rollout.engine import Generation
from tests.strategy.faults import Fault
from tests.strategy.processes import Cluster, assert_same_cells, completed, configured, run_cluster
from tests.strategy.test_equality import LIGHT, assert_equal_runs, reference_of

pytestmark = pytest.mark.processes

CAUSES = {
    "kill": "was killed by signal 9",
    "stop": "stopped responding",
    "raise": "raised InjectedError: injected fault",
}


def inject(*faults: tuple[str, int, str, int]) -> Callable[[World, Session], None]:
    """Order faults (point, rank, action, call) in every rank."""

    def before(world: World, session: Session) -> None:
        for point, rank, action, call in faults:
            Fault(point, rank, action, call)

    return before


def lost(cluster: Cluster) -> list[dict[str, object]]:
    return [row for row in cluster.events() if row["kind"] == "lost"]


@pytest.mark.parametrize(
    "action",
    ["kill", *(pytest.param(action, marks=pytest.mark.slow) for action in ("raise", "stop"))],
)
def test_a_rollout_lost_in_mid_denoise_changes_no_result(tmp_path: Path, action: str) -> None:
    """In its third denoising step of its first task; with lending on."""
    words = ("schedule=full", "schedule.tsp.batch=1", "schedule.async_steps=0")
    config = configured(*LIGHT, *words)
    cluster = run_cluster(tmp_path, 1, 2, config, before=inject(("denoise", 2, action, 3)))
    found, wanted = completed(cluster), reference_of(config)
    assert_same_cells(found, wanted)
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in wanted.weights.items())
    (event,) = lost(cluster)
    assert event["rank"] == 2
    assert f"rank 2 (rollout) {CAUSES[action]}" in str(event["cause"])
    assert len(event["reissued"]) == 1  # type: ignore[arg-type]


def test_I12_a_rollout_that_is_asked_to_go_hands_its_task_over(tmp_path: Path) -> None:
    """In its third denoising step; what it has computed is kept, and no attempt is counted."""
    config = configured(*LIGHT)
    cluster = run_cluster(tmp_path, 1, 2, config, before=inject(("denoise", 2, "go", 3)))
    found, wanted = completed(cluster), reference_of(config)
    assert_same_cells(found, wanted)
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in wanted.weights.items())
    (event,) = [row for row in cluster.events() if row["kind"] == "left"]
    assert (event["rank"], event["cause"]) == (2, "rank 2 (rollout) left: signal SIGTERM")
    given = [row for row in cluster.spans("generate") if row["rank"] == 2]
    assert [row.get("handed_to") for row in given] == [1]
    assert event["reissued"] == [] == lost(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [4, 7])
def test_sharded_trainers_make_again_what_the_last_rollout_sent_to_some_of_them(
    tmp_path: Path, sent: int
) -> None:
    """For each task the rollout sends a message to each trainer, and it dies between two of them.
    Trainers go on with tasks that all of them hold."""
    words = (
        "schedule.gap=1",
        "schedule.tag=true",
        "parallel.sharding=fsdp",
        "allocation.patience_s=30",
    )

    def before(world: World, session: Session) -> None:
        Fault("send", 2, "kill", sent)
        Fault("send", 2, "hang", sent, seconds=1.0)  # first: until the message before has arrived

    config = configured(*LIGHT, "model.lora=null", *words)
    cluster = run_cluster(tmp_path, 2, 1, config, before=before)
    assert_equal_runs(
        completed(cluster), reference_of(config), exact=False, double=False, weight_bound=1e-6
    )
    (event,) = lost(cluster)
    assert len(event["reissued"]) > 0  # type: ignore[arg-type]


def test_the_last_rollouts_death_and_a_forbidden_one_end_the_run(tmp_path: Path) -> None:
    config = configured(*LIGHT)

    def rank_main(world: World, session: Session) -> None:
        Fault("claim", 1, "kill")
        run.build_rank(config, world, session).fit()

    for rollouts, most in ((1, None), (2, 0)):
        outcome = launch_ranks(
            Launch(1, rollouts, rank_main, tmp_path / str(rollouts), max_lost=most)
        )
        assert outcome.status == "failed"
        assert str(outcome.cause).startswith("rank 1 (rollout) was killed by signal 9")


@pytest.mark.slow
def test_a_task_that_kills_two_rollouts_ends_the_run_and_is_named(tmp_path: Path) -> None:
    def poison(rank: run.Rank, world: World) -> None:
        advance = rank.strategy.engine.take_step

        def fatal(generation: Generation) -> Generation:
            if (generation.task.step, generation.task.index) == (0, 3) and not world.is_trainer:
                time.sleep(0.5)  # what it made before is with the trainer, and not its own any more
                raise ValueError("a poisoned prompt")
            return advance(generation)

        rank.strategy.engine.take_step = fatal  # type: ignore[method-assign]

    cluster = run_cluster(tmp_path, 1, 3, configured(*LIGHT), after_build=poison)
    assert cluster.outcome.status == "failed"
    cause = str(cluster.outcome.cause)
    assert cause.startswith("task 3 of step 0 (group 1) lost 2 owners")
    assert "raised ValueError: a poisoned prompt; see logs/rank-" in cause
    assert ": the task itself is the likely cause" in cause
    assert len(lost(cluster)) == 1


def test_a_stale_task_that_comes_back_late_is_made_with_the_version_that_it_needs(
    tmp_path: Path,
) -> None:
    """One-step asynchrony: rank 2 dies with a task of version 0 when the other rollout already
    holds version 1. A rollout that comes late to its first task finds none of version 0 left, so
    the other one waits for it."""
    claimed, others_hold_next = tmp_path / "claimed", tmp_path / "adopted"

    def wait_for(path: Path) -> None:
        while not path.exists():
            threading.Event().wait(0.02)

    def die_late(rank: run.Rank, world: World) -> None:
        if world.is_trainer:
            return
        advance = rank.strategy.engine.take_step

        def slow(generation: Generation) -> Generation:
            task = generation.task
            if world.rank == 2 and (task.step, task.version) == (1, 0):
                claimed.touch()
                wait_for(others_hold_next)
                os.kill(os.getpid(), signal.SIGKILL)
            if world.rank == 1 and (task.step, task.version) == (1, 0):
                wait_for(claimed)
            if world.rank == 1 and task.version == 1:
                others_hold_next.touch()
            return advance(generation)

        rank.strategy.engine.take_step = slow  # type: ignore[method-assign]

    words = ("schedule=full", "schedule.tsp.batch=1", "schedule.tag=false", "max_rl_steps=3")
    config = configured(*LIGHT, *words)
    cluster = run_cluster(tmp_path, 1, 2, config, after_build=die_late)
    found, wanted = completed(cluster), reference_of(config)
    assert_same_cells(found, wanted)
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in wanted.weights.items())
    adopted = [row["version"] for row in cluster.spans("adopt") if row["rank"] == 1]
    assert adopted[:4] == [0, 1, 0, 1]


@pytest.mark.parametrize("kept", [False, True])
def test_ranks_do_not_collect_what_the_launching_process_left(tmp_path: Path, kept: bool) -> None:
    """An earlier store in a reference cycle: its end in a forked rank, where its threads do not
    run, would abort it."""
    left: list[object] = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    left.append(left)
    if not kept:
        del left

    def rank_main(world: World, session: Session) -> None:
        nonlocal left
        left = []
        for _ in range(6):  # they take the stacks of the threads that the fork left behind
            threading.Thread(target=time.sleep, args=(5.0,), daemon=True).start()
        gc.collect()

    outcome = launch_ranks(Launch(1, 1, rank_main, tmp_path))
    assert outcome.status == "completed", outcome.cause
