"""Whole runs that people judge: blue rises within 300 votes, and a resumed run asks for no vote
twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.extensions.votes.people import Person, vote_until

pytestmark = [pytest.mark.slow, pytest.mark.processes]
WORDS = (
    "reward=votes",
    "reward.rewards.votes.scorer.grace_s=0",
    "sampling.task_size=auto",
    "callbacks.evaluation.every=0",
)


def started(repository: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{repository / 'src'}:{repository}"}
    command = [sys.executable, "-m", "digenrl", *words]
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def directory(root: Path, wait_s: float = 60.0) -> Path:
    """Return the run's directory as soon as it serves its page."""
    deadline = time.monotonic() + wait_s
    while not (found := [*root.glob("*/*/votes/access.json")]):
        assert time.monotonic() < deadline, "no page is served"
        time.sleep(0.1)
    return found[0].parents[1]


def blue(run: Path, rl_step: int) -> float:
    """Return the mean blue of the samples of an evaluation."""
    media = np.load(run / "samples" / f"eval-{rl_step}.npz")["media"] / 255.0
    return float((media[:, 2] - media[:, :2].mean(1)).clip(0).mean())


def test_blue_rises_within_300_votes_of_somebody_who_prefers_it(repository, tmp_path):
    process = started(
        repository,
        "train",
        "experiment=scenes_fewstep",
        "data.prompts_per_batch=4",
        "data.group_size=4",
        "max_rl_steps=18",
        f"output_root={tmp_path}",
        *WORDS,
    )
    run, done = directory(tmp_path), threading.Event()
    votes = []
    person = threading.Thread(target=lambda: votes.append(vote_until(run, done, 300)))
    person.start()
    try:
        _, said = process.communicate(timeout=230)
    finally:
        done.set()
        person.join(10)
        process.kill()
    assert process.returncode == 0, said
    before, after = blue(run, 0), blue(run, 18)
    print(f"{votes[0]} votes; blue {before:.4f} -> {after:.4f}")
    assert votes[0] == 288
    assert after > 2 * before
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all("reward/votes" not in row for row in steps if row["kind"] == "eval")
    assert not list((run / "votes").glob("?" * 32))


def test_a_killed_run_that_resumes_asks_for_no_vote_twice(repository, tmp_path):
    words = ("data.prompts_per_batch=2", "data.group_size=4", "max_rl_steps=3", *WORDS)
    more = ("callbacks.checkpoint.every=1", f"output_root={tmp_path}")
    first = started(repository, "train", "experiment=scenes_fewstep", *words, *more)
    try:
        run = directory(tmp_path)
        person = Person(run)
        for _ in range(11):  # the first step has 8
            person.prefer_blue(person.next(60))
        deadline = time.monotonic() + 60
        while not [*run.glob("checkpoints/step-*/manifest.json")]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert first.poll() is None
    finally:
        for each in psutil.Process(first.pid).children(recursive=True):
            each.kill()
        first.kill()
        first.communicate()
    second = started(repository, "resume", str(run))
    done, votes = threading.Event(), []

    def go_on() -> None:
        access = run / "votes" / "access.json"
        old = access.read_text()
        while access.exists() and access.read_text() == old and not done.wait(0.1):
            pass
        votes.append(vote_until(run, done, 300))

    person_again = threading.Thread(target=go_on)
    person_again.start()
    try:
        _, said = second.communicate(timeout=150)
    finally:
        done.set()
        person_again.join(10)
        second.kill()
    assert second.returncode == 0, said
    assert votes == [3 * 8 - 11]
    lines = [json.loads(line) for line in (run / "votes" / "votes.jsonl").read_text().splitlines()]
    assert {*Counter(line["group"] for line in lines).values()} == {4}


def test_a_run_that_nobody_judges_does_not_hang_and_stops_when_asked(repository, tmp_path):
    process = started(
        repository,
        "train",
        "experiment=scenes_fewstep",
        "data.prompts_per_batch=2",
        "data.group_size=4",
        "limits.stage_floor_s=5",
        "limits.start_s=20",
        "allocation.stop_grace_s=1",
        f"output_root={tmp_path}",
        *WORDS,
    )
    try:
        directory(tmp_path)
        time.sleep(35)
        assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert "signal SIGINT" in said
    assert "hangs" not in said
