"""A rollout behind a line of 100 Mbit/s: the run computes the same, and little goes over the
line."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.namespaces import Cable, NotHere, bytes_sent, cable, inside
from tests.storm import published
from tests.training import SMALL, Train, commands

pytestmark = [pytest.mark.processes, pytest.mark.alone, pytest.mark.slow]

MBIT = 100
FAR = (
    "{gpu:cpu,count:8,memory_gib:16,tflops:0.05,hbm_tb_s:0.02,intra_gb_s:4,inter_gb_s:4,per_node:8}"
)
WORDS = (
    *SMALL,
    "schedule=gap",
    "callbacks.checkpoint.every=1000",
    "max_rl_steps=16",
    "allocation.trainers=1",
    "allocation.rollouts=1",
    "allocation.patience_s=60",
    "model.lora=null",  # all 312,000 weights travel
    "model.keep_reference=true",
    f"+hardware.pools.far={FAR}",
    f"+hardware.links={{wan:{{between:[local,far],gb_s:{MBIT / 8e3}}}}}",
)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Any]:
    """Starts commands, and leaves none behind."""
    yield from commands(tmp_path)


@pytest.fixture
def line() -> Iterator[Cable]:
    """To a namespace, `MBIT` Mbit/s each way."""
    try:
        with cable() as found:
            found.thin(MBIT)
            yield found
    except NotHere as error:
        pytest.skip(str(error))


def far_run(running: Any, line: Cable, *words: str) -> tuple[Train, int]:
    """A run whose only rollout, from an early step on, is at the other end; bytes that the trainer
    sent there."""
    train = running(*WORDS, *words, f"network.interface={line.interface}", fork=True)
    train.wait_for_step(1)
    os.kill(train.ranks()[1].pid, signal.SIGTERM)
    before, join = bytes_sent(None, line.interface), f"run={train.run_dir}"
    joiner = inside(line.namespace, lambda: running(join, tiny=(), fork=True, command="join"))
    received = 0
    while train.poll() is None:
        received = bytes_sent(None, line.interface)
        time.sleep(0.05)
    assert train.finish() == 0, train.stderr
    assert joiner.finish() == 0, joiner.stderr
    return train, received - before


def test_a_remote_rollout_over_a_thin_line_changes_time_alone(running: Any, line: Cable) -> None:
    calm = running(*WORDS, fork=True)
    assert calm.finish() == 0, calm.stderr
    plain, many = far_run(running, line, "network.delta=false", "network.compress=false")
    train, few = far_run(running, line, "network.whole_every=10")
    assert published(train) == published(plain) == published(calm)
    assert few < 0.75 * many, f"{few} bytes in place of {many}"
