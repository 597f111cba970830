"""Two processes never go on with one run."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from digenrl.record import run_lock
from digenrl.record.run_lock import HOLDER, RunIsHeld, hold_run, release_run, say_holder
from tests.training import SMALL, Train

HOLDS = (
    "import os, sys, time, pathlib; from digenrl.record import run_lock; run = pathlib.Path(sys.argv[1]); "
    "run_lock.hold_run(run); run_lock.say_holder(run); child = os.fork(); "
    "run_lock.close_inherited() if child == 0 and sys.argv[2] == 'rank' else None; "
    "print(os.getpid(), flush=True) if child else None; time.sleep(60)"
)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Callable[[str], int]]:
    """Starts a process that holds the lock of `tmp_path`, with a child of a kind."""
    started = []

    def start(kind: str) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDS, str(tmp_path), kind],
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        started.append(process)
        assert process.stdout is not None
        return int(process.stdout.readline())

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.processes
def test_the_second_process_is_told_who_holds_the_run_and_since_when(
    tmp_path: Path, other: Callable[[str], int]
) -> None:
    holder = other("rank")
    with pytest.raises(RunIsHeld) as caught:
        hold_run(tmp_path)
    said = str(caught.value)
    assert f"process {holder} on {socket.gethostname()} since {time.strftime('%Y-')}" in said
    assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", said)
    os.kill(holder, signal.SIGKILL)
    hold_run(tmp_path)  # its rank still lives, and holds nothing
    release_run(tmp_path)


@pytest.mark.processes
def test_a_holder_that_died_is_waited_for_while_its_monitor_lives(
    tmp_path: Path, other: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = other("monitor")
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    monkeypatch.setattr(run_lock, "_DYING_S", 1.0)
    began = time.monotonic()
    with pytest.raises(RunIsHeld):
        hold_run(tmp_path)
    assert time.monotonic() > began + 0.9


def test_a_process_keeps_its_own_lock_and_leaves_nothing(tmp_path: Path) -> None:
    hold_run(tmp_path)
    hold_run(tmp_path)
    say_holder(tmp_path)
    assert json.loads((tmp_path / HOLDER).read_text())["process"] == os.getpid()
    release_run(tmp_path)
    release_run(tmp_path)
    assert not list(tmp_path.iterdir())
    hold_run(tmp_path)
    release_run(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"host": "\\u001b[2J", "process": "x"}', b"\xff"]
)
def test_what_says_the_holder_may_hold_anything(tmp_path: Path, content: bytes) -> None:
    (tmp_path / HOLDER).write_bytes(content)
    assert run_lock._describe_holder(tmp_path) == "another process, which has just begun"
    facts = {"host": "\x1b[2J", "process": 1, "since": 1e300}
    (tmp_path / HOLDER).write_text(json.dumps(facts))
    assert run_lock._describe_holder(tmp_path) == r"process 1 on \x1b[2J since an unknown time"


def test_a_file_system_without_locks_refuses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)
    hold_run(tmp_path)
    release_run(tmp_path)


@pytest.mark.heavy
@pytest.mark.processes
def test_a_resume_of_a_running_run_is_refused_and_touches_nothing(
    running: Callable[..., Train],
) -> None:
    train = running(*SMALL, "max_rl_steps=400", "callbacks.checkpoint.every=1", fork=True)
    train.wait_for_step(2)
    second = running(f"resume={train.run_dir}", "max_rl_steps=500", tiny=(), fork=True)
    assert second.finish() == 2, second.stderr
    assert re.search(rf"is held by process {train.pid} on .* since ", second.stderr)
    assert "Traceback" not in second.stderr
    os.kill(train.pid, signal.SIGTERM)
    assert train.finish() == 128 + signal.SIGTERM
    assert not (train.run_dir / HOLDER).exists()
    third = running(f"resume={train.run_dir}", "max_rl_steps=1", tiny=(), fork=True)
    assert third.finish() in (0, 2), third.stderr
    assert "is held by" not in third.stderr
