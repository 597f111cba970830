"""A storm over small runs: random signals and mishaps, at random moments, to random processes.

- A signal to stop. The run must end saved or cleanly, with its cause and no process left. A resumed
  run must give the weights of the calm run, bit for bit.
- A pause (SIGSTOP, then SIGCONT), or the death of a rank at any point, also in the last save or in
  an evaluation. The run must complete, with the weights of the calm run. Only a death before the
  first RL step is finished may end the run: a fault from the start would come again.
- A scorer that ends its process in some way. The run must fail with a cause and no process left, or
  complete with the weights of the calm run.

    python -m tests.storm n=200 seed=0 resume=4 kinds=signal,pause,death,exit

resume: every how-manieth stopped run is continued to its end.
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
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import digenrl.extensions.tasks.digits  # noqa: F401  (diffusers loads once, here, and not in every run)
from digenrl import run  # noqa: F401
from digenrl.cluster.signals import LEAVES, STOPS
from digenrl.strategy.checkpoint_io import newest_valid
from tests.strategy.faults import Leaving
from tests.strategy.processes import TINY
from tests.training import GONE_WITHIN_S, SMALL, Train, commands, fault

STEPS = 6
RUNS = {
    "apart": (
        "schedule=gap",
        "allocation.trainers=1",
        "allocation.rollouts=2",
        "algorithm.updates_per_batch=2",
    ),
    "together": (
        "schedule=colocated",
        "schedule.gap=1",
        "allocation.trainers=2",
        "algorithm.updates_per_batch=2",
    ),
    "sharded": ("parallel.sharding=fsdp", "allocation.trainers=2", "allocation.rollouts=1"),
    "async": (
        "schedule=gap",
        "schedule.async_steps=1",
        "schedule.tag=true",
        "algorithm.updates_per_batch=2",
    ),
}
BY_ITSELF = ("callbacks.checkpoint.every=1000", f"max_rl_steps={STEPS}")
DEATHS = (
    "claim",
    "denoise",
    "decode",
    "reward",
    "accumulate",
    "reduce",
    "publish",
    "save",
    "evaluate",
)
"""Points of `tests.strategy.faults.POINTS` at which a rank is killed."""
EVALUATED = (
    "callbacks.evaluation.samples_per_prompt=2",
    "callbacks.evaluation.max_prompts=4",
    "callbacks.evaluation.every=2",
)
LIMIT_S = 60.0
"""Seconds from the signal to the end, on a machine that does other work too."""
Start = Callable[..., Train]


def _moment(chance: random.Random) -> str:
    """Draw the moment of a shot: see `Shot.moment`."""
    return chance.choices(("start", "ranks", "step", "end"), (1, 2, 6, 1))[0]


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
    def random(cls, chance: random.Random, runs: Sequence[str]) -> Shot:
        """A signal to stop, at one of `runs`."""
        moment = _moment(chance)
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


@dataclass(frozen=True)
class Mishap:
    """What a run survives, or ends of with a cause."""

    run: str
    kind: str
    """pause, death or exit"""
    words: tuple[str, ...]
    """What orders it, in the run's configuration."""
    pause: Shot | None = None
    """Moment and target of SIGSTOP."""
    seconds: float = 0.0
    """Seconds from SIGSTOP to SIGCONT; twice as many are less than `limits.suspended_s`."""

    @classmethod
    def random(cls, chance: random.Random, runs: Sequence[str], kind: str) -> Mishap:
        """Draw a mishap of a kind, at one of `runs`."""
        name, rank, call = chance.choice(runs), chance.randrange(3), chance.randrange(1, STEPS + 1)
        again = ("allocation.max_restarts=3", "allocation.restart_pause_s=0.1")
        if kind == "pause":
            moment = _moment(chance)
            shot = Shot(
                run=name,
                number=signal.SIGSTOP,
                target=chance.choice(("launcher", "group", "rank")),
                moment=moment,
                after=chance.randrange(1, STEPS - 1),
                delay=chance.uniform(0.0, 0.5),
                grace="auto",
                twice=chance.random() < 0.3,
            )
            return cls(name, kind, (), shot, chance.uniform(0.02, 1.2))
        if kind == "death":
            point = chance.choice(DEATHS)
            at = 1 if point == "save" else call
            evaluated = EVALUATED if point == "evaluate" else ()
            order = fault(point, rank, "kill", call=at, once="true")
            return cls(name, kind, (*again, *evaluated, *order))
        scorer = "reward.rewards.judge_a.scorer"
        way = chance.choice(tuple(Leaving.WAYS))
        words = (
            "allow_targets=[tests]",
            f"{scorer}._target_=tests.strategy.faults.Leaving",
            f"+{scorer}.way={way}",
            f"+{scorer}.call={call}",
            f"reward.placement={chance.choice(('inline', 'thread', 'process'))}",
        )
        return cls(name, kind, words)


def survive(start: Start, mishap: Mishap, undisturbed: dict[int, str]) -> str:
    """Let it happen, and check how the run ends; returns how."""
    evaluates = set(EVALUATED) <= set(mishap.words)
    tiny = [word for word in TINY if not (evaluates and word == "~callbacks.evaluation")]
    train = start(*SMALL, *RUNS[mishap.run], *BY_ITSELF, *mishap.words, tiny=tiny, fork=True)
    if mishap.pause is not None:
        _wait_for(train, mishap.pause)
        for _ in range(1 + mishap.pause.twice):
            met = _fire(train, mishap.pause)
            time.sleep(mishap.seconds)
            _continue(train, met)
    # A scorer's process that dies begins again, which takes seconds each time.
    code = _end(train, str(mishap), LIMIT_S if mishap.kind != "exit" else 5 * LIMIT_S)
    assert list(train.root.glob("outputs/*/*")), f"{mishap}: {code}\n{train.stderr}"
    summary = train.summary
    attempts = f"{summary.get('restarts', 0)} restarts"
    context = (
        f"{mishap}: {code}, {summary['status']}, {summary['cause']}, {attempts}\n{train.stderr}"
    )
    assert published(train).items() <= undisturbed.items(), context
    assert "Traceback" not in train.stderr, context
    if mishap.kind == "exit" and code == 1:
        assert summary["status"] == "failed", context
        assert summary["cause"], context
        return "exit: failed, with a cause"
    if mishap.kind == "exit" and code == 128 + signal.SIGTERM:
        assert summary["cause"] == "signal SIGTERM", context
        return "exit: stopped, as SIGTERM asks"
    if mishap.kind == "death" and summary["rl_steps"] == 0 and code == 1:
        assert "was killed by signal 9 (SIGKILL" in summary["cause"], context
        return "death before the first step was finished: failed, with its cause"
    assert (code, summary["status"]) == (0, "completed"), context
    assert published(train) == undisturbed, context
    return f"{mishap.kind}: completed, bit-equal, {attempts}"


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
    code = _end(train, str(shot))
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


def _continue(train: Train, met: Sequence[int]) -> None:
    """SIGCONT to the group, where processes begin between two looks, and to those that were met."""
    with suppress(ProcessLookupError):
        os.killpg(train.pid, signal.SIGCONT)
    for pid in met:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _end(train: Train, what: str, limit_s: float = LIMIT_S) -> int:
    """The exit code, when the run has ended and no process of it is left."""
    deadline = time.monotonic() + limit_s
    while (code := train.poll()) is None:
        assert time.monotonic() < deadline, f"{what}: hangs\n{train.stderr}"
        time.sleep(0.02)
    # a helper of a launcher that died at its start goes a moment later
    deadline = time.monotonic() + GONE_WITHIN_S
    while left := train.left():
        assert time.monotonic() < deadline, f"{what}: left behind: {left}"
        time.sleep(0.02)
    return code


def _wait_for(train: Train, shot: Shot) -> None:
    """Wait until the moment has come, or the run is over."""
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


def _fire(train: Train, shot: Shot) -> list[int]:
    """Send the signal, and return the processes that have got it."""
    if train.poll() is not None:
        return []
    present = train.left()
    others = [pid for pid in present if pid != train.pid] if shot.target == "rank" else []
    met = present if shot.target == "group" else [random.choice(others or [train.pid])]
    try:
        if shot.target == "group":
            os.killpg(train.pid, shot.number)
        else:
            os.kill(met[0], shot.number)
    except ProcessLookupError:  # it has just ended, or is no group yet
        return []
    return met


def storm(
    root: Path,
    shots: int,
    seed: int | str,
    resume_every: int,
    runs: Sequence[str] = tuple(RUNS),
    kinds: Sequence[str] = ("signal",),
) -> tuple[Counter[str], list[str]]:
    """Fire `shots` times; returns how many runs ended how, and what went wrong."""
    ends: Counter[str] = Counter()
    wrong: list[str] = []
    started = commands(root)
    start = next(started)
    undisturbed = cache(partial(calm, start))
    for number in range(shots):
        try:
            chance = random.Random(f"{seed}/{number}")
            kind = chance.choice(kinds) if len(kinds) > 1 else kinds[0]
            if kind == "signal":
                shot = Shot.random(chance, runs)
                resume = number % resume_every == 0
                end = strike(start, shot, undisturbed(shot.run), resume)
            else:
                mishap = Mishap.random(chance, runs, kind)
                end = survive(start, mishap, undisturbed(mishap.run))
            ends[end] += 1
        except AssertionError as error:
            wrong.append(f"shot {number}: {error}")
            print(wrong[-1], flush=True)
        print(f"{ends.total()} of {number + 1}, seed {seed}", file=sys.stderr, flush=True)
    next(started, None)
    return ends, wrong


if __name__ == "__main__":
    settings = {"n": "200", "seed": "0", "resume": "4", "kinds": "signal,pause,death,exit"}
    settings |= dict(word.split("=", 1) for word in sys.argv[1:])
    with tempfile.TemporaryDirectory() as directory:
        counted, failures = storm(
            Path(directory),
            int(settings["n"]),
            settings["seed"],
            int(settings["resume"]),
            kinds=settings["kinds"].split(","),
        )
    print(*(f"{count:4d} {end}" for end, count in counted.most_common()), sep="\n")
    print(f"{counted.total()} of {settings['n']} ended as they must, seed {settings['seed']}")
    sys.exit(bool(failures))
