"""A storm of stop signals: random ones, at random moments, to random processes of small runs. Every
run must end saved or cleanly, with its cause and no process left; what is resumed must give the
weights of the calm run, bit for bit.

    python -m tests.storm n=200 seed=0 resume=4     (resume: every how-manieth run is continued to its end)
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import digenrl.extensions.tasks.digits  # noqa: F401  (diffusers loads once, here, and not in every run)
from digenrl import run  # noqa: F401
from digenrl.cluster.signals import LEAVES, STOPS
from digenrl.strategy.checkpoint_io import newest_valid
from tests.training import GONE_WITHIN_S, SMALL, Train, commands

STEPS = 6
RUNS = {
    "apart": (
        "schedule=gap",
        "allocation.trainers=1",
        "allocation.rollouts=2",
        "algorithm.updates_per_batch=2",
    ),
    "together": ("schedule=colocated", "allocation.trainers=2", "algorithm.updates_per_batch=2"),
    "sharded": ("parallel.sharding=fsdp", "allocation.trainers=2", "allocation.rollouts=1"),
    "async": (
        "schedule=gap",
        "schedule.async_steps=1",
        "schedule.tag=true",
        "algorithm.updates_per_batch=2",
    ),
}
BY_ITSELF = ("callbacks.checkpoint.every=1000", f"max_rl_steps={STEPS}")
LIMIT_S = 60.0
"""From the signal to the end, on a machine that does other things too."""
Start = Callable[..., Train]


@dataclass(frozen=True)
class Shot:
    """One signal, or two."""

    run: str
    number: signal.Signals
    target: str
    """launcher, group or rank (of the processes that the launcher has started, any; not with a
    signal to leave)"""
    moment: str
    """start (nothing exists yet), ranks (the run directory exists), step (some are finished) or end
    (all are)"""
    after: int
    """RL steps finished, for step."""
    delay: float
    """Seconds from the moment to the signal."""
    grace: str
    """allocation.stop_grace_s"""
    twice: bool

    @classmethod
    def random(cls, seed: str, runs: Sequence[str]) -> Shot:
        """The shot of a seed, at one of `runs`."""
        chance = random.Random(seed)
        moment = chance.choices(("start", "ranks", "step", "end"), (1, 2, 6, 1))[0]
        number = chance.choice(STOPS)
        return cls(
            run=chance.choice(runs),
            number=number,
            target=chance.choice(
                ("launcher", "group") if number in LEAVES else ("launcher", "group", "rank")
            ),
            moment=moment,
            after=chance.randrange(1, STEPS - 3),
            delay=chance.uniform(
                0.0, {"start": 0.5, "ranks": 1.5, "step": 0.3, "end": 0.05}[moment]
            ),
            grace=chance.choice(("auto", "0")),
            twice=chance.random() < 0.2,
        )


def calm(start: Start, name: str) -> dict[int, str]:
    """version -> digest of its weights, of a run that nobody disturbs."""
    train = start(*SMALL, *RUNS[name], *BY_ITSELF, fork=True)
    assert train.finish() == 0, train.stderr
    return published(train)


def published(train: Train) -> dict[int, str]:
    """version -> digest of its weights, over all attempts; they must agree."""
    found: dict[int, str] = {}
    for row in train.rows("events.jsonl"):
        if row["kind"] == "publish":
            assert found.setdefault(row["version"], row["digest"]) == row["digest"], (
                f"two versions {row['version']}"
            )
    return found


def strike(start: Start, shot: Shot, undisturbed: dict[int, str], resume: bool) -> str:
    """Fire, and check how the run ends; returns how."""
    train = start(
        *SMALL, *RUNS[shot.run], *BY_ITSELF, f"allocation.stop_grace_s={shot.grace}", fork=True
    )
    _wait_for(train, shot)
    _fire(train, shot)
    if shot.twice:
        time.sleep(1.2)
        _fire(train, shot)
    deadline = time.monotonic() + LIMIT_S
    while (code := train.poll()) is None:
        assert time.monotonic() < deadline, f"{shot}: hangs\n{train.stderr}"
        time.sleep(0.02)
    deadline = (
        time.monotonic() + GONE_WITHIN_S
    )  # a helper of a launcher that died at its start goes a moment later
    while left := train.left():
        assert time.monotonic() < deadline, f"{shot}: left behind: {left}"
        time.sleep(0.02)
    if not list(train.root.glob("outputs/*/*")):
        assert code in (128 + shot.number, -shot.number), f"{shot}: {code}\n{train.stderr}"
        return "nothing had begun"
    summary, stopped = train.summary, f"signal {shot.number.name}"
    context = (
        f"{shot}: {code}, {summary['status']}, {summary['cause']}, {summary['rl_steps']} "
        f"steps\n{train.stderr}"
    )
    assert train.stdout.splitlines()[-1] == str(train.run_dir), context
    assert published(train).items() <= undisturbed.items(), context
    if (
        summary["status"] == "completed"
    ):  # the signal met a rank that was gone, the monitor, or the report
        assert code in (0, 128 + shot.number), context
        return "completed before it"
    assert (code, summary["status"], summary["cause"]) == (128 + shot.number, "stopped", stopped), (
        context
    )
    if summary["rl_steps"] == 0:
        assert not list(train.run_dir.glob("checkpoints/step-*")), context
        return "stopped before a step was finished"
    saved = newest_valid(train.run_dir / "checkpoints")
    assert saved.name == f"step-{summary['rl_steps']:06d}", f"{saved.name} {context}"
    if resume:
        again = start(f"resume={train.run_dir}", tiny=(), fork=True)
        assert again.finish() == 0, f"{context}{again.stderr}"
        assert published(train) == undisturbed, context
        return "saved, and resumed bit-equal"
    return "saved"


def _wait_for(train: Train, shot: Shot) -> None:
    """Until the moment has come, or the run is over."""
    deadline = time.monotonic() + LIMIT_S
    while train.poll() is None and not _reached(train, shot):
        assert time.monotonic() < deadline, f"{shot}: it never came to that\n{train.stderr}"
        time.sleep(0.01)
    time.sleep(shot.delay)


def _reached(train: Train, shot: Shot) -> bool:
    if shot.moment == "start":
        return (train.root / "stderr").exists()
    if shot.moment == "ranks":
        return any(train.root.glob("outputs/*/*/logs"))
    if shot.moment == "step":
        return any(
            row["kind"] == "step" and row["rl_step"] >= shot.after
            for row in train.rows("metrics.jsonl")
        )
    return any(row["kind"] == "end" for row in train.rows("events.jsonl"))


def _fire(train: Train, shot: Shot) -> None:
    if train.poll() is not None:
        return
    others = [pid for pid in train.left() if pid != train.pid] if shot.target == "rank" else []
    try:
        if shot.target == "group":
            os.killpg(train.pid, shot.number)
        else:
            os.kill(random.choice(others) if others else train.pid, shot.number)
    except ProcessLookupError:  # it has just ended, or is no group yet
        return


def storm(
    root: Path, shots: int, seed: int | str, resume_every: int, runs: Sequence[str] = tuple(RUNS)
) -> tuple[Counter[str], list[str]]:
    """Fire `shots` times; returns how many runs ended how, and what went wrong."""
    ends: Counter[str] = Counter()
    wrong: list[str] = []
    started = commands(root)
    start = next(started)
    undisturbed = cache(partial(calm, start))
    for number in range(shots):
        try:
            shot = Shot.random(f"{seed}/{number}", runs)
            ends[strike(start, shot, undisturbed(shot.run), resume=number % resume_every == 0)] += 1
        except AssertionError as error:
            wrong.append(f"shot {number}: {error}")
    next(started, None)
    return ends, wrong


if __name__ == "__main__":
    settings = {"n": 200, "seed": 0, "resume": 4} | {
        key: int(value) for key, value in (word.split("=") for word in sys.argv[1:])
    }
    with tempfile.TemporaryDirectory() as directory:
        counted, failures = storm(
            Path(directory), settings["n"], settings["seed"], settings["resume"]
        )
    print(*failures, *(f"{count:4d} {end}" for end, count in counted.most_common()), sep="\n")
    sys.exit(bool(failures))
