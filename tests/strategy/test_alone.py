"""One colocated rank without launcher or cluster: everything that it does, in its order. What is left out, done
twice or done at another moment gives other spans, events or files, also where results agree."""

from __future__ import annotations

import multiprocessing
import signal
import socket
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from digenrl import run
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.store import StoreServer
from digenrl.cluster.world import Session, World
from digenrl.strategy.checkpoint_io import newest_valid
from tests.strategy.processes import (
    Cluster,
    Probe,
    RunOutcome,
    assert_same_cells,
    configured,
    read_record,
    relative,
)
from tests.strategy.reference import reference
from tests.strategy.test_equality import LIGHT

pytestmark = pytest.mark.processes
WORDS = (
    *LIGHT,
    "schedule=colocated",
    "schedule.gap=1",
    "reward.placement=inline",
    "data.prompts_per_batch=2",
    "data.group_size=2",
    "sampling.task_size=1",
    "sampling.steps=3",
    "algorithm.updates_per_batch=2",
    "callbacks.checkpoint.every=1",
)


class NoHandler(pl.Callback):
    """Fail if Lightning handles SIGTERM: it would broadcast before each micro-batch. Fail too if a
    step could not be dropped: an adapter is trained, so the weights before the step are kept."""

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        parts = trainer.strategy.parts  # type: ignore[attr-defined]
        assert parts.stop_vote._droppable()


def alone(directory: Path, checkpoint: Path | None = None) -> Cluster:
    """Run a rank to its end in a fork, because a process that has trained can fork no ranks that
    train; and read what it recorded."""
    probes = directory / "probe"
    probes.mkdir(parents=True)

    def rank() -> None:
        handshake = Handshake()
        server = StoreServer(socket.create_server(("127.0.0.1", 0)), handshake)
        session = Session("127.0.0.1", server.port, handshake, directory, time.time())
        callbacks = [Probe(probes), NoHandler()]
        run.build_rank(configured(*WORDS), World(0, 1, 0), session, callbacks).fit(checkpoint)
        server.close()

    process = multiprocessing.get_context("fork").Process(target=rank)
    process.start()
    process.join()
    assert process.exitcode == 0, "see its traceback above"
    return Cluster(RunOutcome(), read_record(probes), directory)


def trace(cluster: Cluster) -> list[tuple[Any, ...]]:
    """(stage, cause or what, step, version, group) of each span."""
    names = ("stage", "cause", "what", "step", "version", "group")
    return [tuple(row[name] for name in names if name in row) for row in cluster.spans()]


def of_step(step: int) -> list[tuple[Any, ...]]:
    """What one RL step does: all is generated before the first of two updates, because nobody holds
    the published weights after it."""
    made = [
        row
        for group in (0, 0, 1, 1)
        for row in (
            ("generate", step, step, group),
            *((stage, step, group) for stage in ("decode", "score", "send")),
        )
    ]
    trained = [
        row for group in (0, 1) for row in (("train", step, group), ("optimizer", "reduce", step))
    ]
    return [*made, *trained, ("publish", step + 1)]


def test_a_colocated_rank_does_everything_once_and_goes_on_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    whole = alone(tmp_path / "whole")
    assert trace(whole) == [("publish", 0), *of_step(0), *of_step(1)]
    kinds = [event["kind"] for event in whole.events()]
    assert kinds.count("checkpoint") == 2, "written beside the next step"
    others = ["rewards", "publish", "start", "publish", "publish", "stop"]
    assert [kind for kind in kinds if kind != "checkpoint"] == others
    assert [event["version"] for event in whole.events() if "version" in event] == [0, 1, 2]
    digests = [row["digest"] for row in whole.spans("publish")]
    assert digests == [event["digest"] for event in whole.events() if "digest" in event]
    rows = [row for row in whole.metrics() if row["kind"] == "step"]
    counts = {"samples": 4, "cells_trained": 8, "cells_skipped": 0, "groups_trained": 2}
    assert [row["rl_step"] for row in rows] == [1, 2]
    assert all({name: row[name] for name in counts} == counts for row in rows)
    wanted = reference(configured(*WORDS))
    assert_same_cells(whole.record, wanted, steps=[0])
    assert len(whole.record.gradients) == len(wanted.gradients) == 4
    for found, other in zip(whole.record.gradients, wanted.gradients, strict=True):
        assert relative(found, other) <= 1e-5

    first, last = sorted((whole.run_dir / "checkpoints").glob("step-*"))
    assert newest_valid(whole.run_dir / "checkpoints") == last
    rest = alone(tmp_path / "rest", checkpoint=first)
    assert trace(rest) == [("publish", 1), *of_step(1)]
    assert [row["digest"] for row in rest.spans("publish")] == digests[1:]
    both = rest.record.weights, whole.record.weights
    assert all(map(torch.equal, *(weights.values() for weights in both)))
