"""The fault matrix: launcher, trainer or rollout is killed, suspended or raises, wherever the run
stands.

When a rollout ends, the run goes on with the others. Any other end stops the run within ten
seconds. Its cause is then in standard error and summary.json, and no process is left. A handful of
cases runs by default, the whole matrix in test-all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.training import SMALL, assert_failed, fault, watch

pytestmark = [pytest.mark.processes, pytest.mark.alone]

APART = (*SMALL, "schedule=gap", "allocation.trainers=2", "allocation.rollouts=2")
"""Ranks 0 and 1 train, 2 and 3 generate."""
TOGETHER = (*SMALL, "schedule=colocated", "allocation.trainers=2")
"""Both ranks do everything."""
ACTIONS = ("kill", "stop", "raise")
TRAINING = ("before_join", "after_join", "receive", "accumulate", "reduce", "publish")
GENERATING = ("claim", "denoise", "reward", "send")
ANYWHERE = [*((point, 0) for point in TRAINING), *((point, 2) for point in GENERATING)]
"""Point, and a rank that comes to it in `APART`."""
LAUNCHER = {
    "kill": "was killed",
    "stop": "stopped responding (it is suspended)",
    "raise": "injected fault",
}
RANK = {
    "kill": "was killed by signal 9 (SIGKILL; sent from outside, not for lack of memory)",
    "stop": "stopped responding",
    "raise": "raised InjectedError: injected fault",
}


def some(*chosen: tuple[object, ...], of: list[tuple[Any, ...]]) -> list[Any]:
    """All parameters; those that are not chosen are slow."""
    assert set(chosen) <= set(of)
    return [pytest.param(*row, marks=() if row in chosen else pytest.mark.slow) for row in of]


@pytest.mark.parametrize(
    ("point", "rank", "action"),
    some(
        ("accumulate", 0, "stop"),
        of=[(point, rank, action) for point, rank in ANYWHERE for action in ACTIONS],
    ),
)  # fmt: skip
def test_launcher(running: Any, point: str, rank: int, action: str) -> None:
    train = running(*APART, *fault(point, rank, action, target="launcher"), fork=True)
    assert_failed(train, LAUNCHER[action])
    assert "the launcher" in train.summary["cause"]


@pytest.mark.parametrize(
    ("point", "rank", "action"),
    some(
        ("reduce", 1, "stop"),
        of=[(point, rank, action) for point in (*TRAINING, *GENERATING) for rank in (0, 1) for action in ACTIONS],
    ),
)  # fmt: skip
def test_trainer(running: Any, point: str, rank: int, action: str) -> None:
    train = running(
        *(APART if point in TRAINING else TOGETHER), *fault(point, rank, action), fork=True
    )
    assert_failed(train, f"rank {rank} (trainer) {RANK[action]}")


@pytest.mark.parametrize(
    ("point", "rank", "action"),
    some(
        ("publish", 0, "kill"),
        of=[
            *((point, 2, action) for point in (*GENERATING, *TRAINING[:3]) for action in ACTIONS),
            *((point, 0, action) for point in ("accumulate", "reduce", "publish") for action in ACTIONS),
        ],
    ),
)  # fmt: skip
def test_rollout(running: Any, point: str, rank: int, action: str) -> None:
    """Rank 2 fails, at its own point or when a trainer comes to one; the run goes on with rank
    3."""
    train = running(
        *APART, *fault(point, rank, action, target="self" if rank == 2 else 2), fork=True
    )
    watch(train)
    assert train.finish() == 0, train.stderr
    summary = train.summary
    assert (summary["status"], summary["rl_steps"], summary["restarts"]) == ("completed", 2, 1)
    assert len(summary["lost"]) == 1
    assert f"rank 2 (rollout) {RANK[action]}" in summary["lost"][0]
    assert summary["lost"][0] in train.stderr


@pytest.fixture
def three_gib() -> Iterator[Path]:
    """A control group that may use 3 GiB; skipped where none can be made."""
    for root, key in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"digenrl-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / key).write_text(str(3 << 30))
            break
        except OSError:
            continue
    else:
        pytest.skip("no memory control group can be made here")
    yield group
    group.rmdir()


@pytest.mark.slow
def test_out_of_memory_is_said_where_the_kernel_counts_it(running: Any, three_gib: Path) -> None:
    enter = ["sh", "-c", f'echo $$ > {three_gib}/cgroup.procs && exec "$@"', "sh"]
    train = running(*SMALL, *fault("accumulate", 0, "exhaust"), wrapper=enter)
    assert_failed(
        train, "rank 0 (trainer) was killed by signal 9 (SIGKILL; the kernel ran out of memory)"
    )
