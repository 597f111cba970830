"""A storm over one run: rollouts are killed, suspended, asked to go, and others join, at random steps of a seed. At the
end the weights must be those of the calm run, bit for bit, and no trainer may have begun again.

    make chaos ARGS="seed=11 events=20"        (python -m tests.chaos seed=11 events=20)

The last line of standard output is the path of a JSON file: `bit_equal`, `trainer_restarts`, `events`, and what the run
noted (`lost`, `left`, `joined`).
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

import digenrl.models.digits  # noqa: F401  (diffusers loads once, here, and not in every process)
from digenrl import run  # noqa: F401
from tests.storm import published
from tests.training import SMALL, Train, commands

WORDS = (*SMALL, "schedule=gap", "schedule.handoff=true", "sampling.steps=8", "callbacks.checkpoint.every=1000")
RUN = ("allocation.trainers=1", "allocation.patience_s=60", "allocation.max_restarts=3")
STEPS_PER_EVENT = 2
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM}
MOST = 3
"""Rollouts at a time: a small machine runs them all."""
OUTPUT = Path("outputs/chaos")


class Storm:
    """What happens to one run.

    Args:
        start: starts commands (`tests.training.commands`).
        steps: RL steps of the run; events are spread over them.
    """

    def __init__(self, start: Callable[..., Train], seed: int, events: int, steps: int) -> None:
        self._start, self._chance, self._steps, self._count = start, random.Random(seed), steps, events
        self._joiners: list[Train] = []
        self.events: list[dict[str, Any]] = []

    def rage(self, train: Train) -> None:
        """Let every event happen at its step, then see the run to its end."""
        for number in range(self._count):
            train.wait_for_step(1 + number * (self._steps - 2) // self._count)
            time.sleep(self._chance.uniform(0.0, 0.3))
            self._strike(train)
        assert train.finish() == 0, train.stderr
        for joiner in self._joiners:
            joiner.finish()

    def _strike(self, train: Train) -> None:
        victims = self._victims(train)
        kind = self._chance.choice((*SIGNALS, "join")) if 1 < len(victims) < MOST else "join"
        kind = self._chance.choice((*SIGNALS,)) if len(victims) >= MOST else kind
        event: dict[str, Any] = {"event": kind, "time": time.time()}
        if kind == "join":
            self._joiners.append(self._start(f"run={train.run_dir}", tiny=(), fork=True, command="join"))
        else:
            victim = self._chance.choice(victims)
            event["process"] = victim.pid
            victim.send_signal(SIGNALS[kind])
        self.events.append(event)

    def _victims(self, train: Train) -> list[psutil.Process]:
        """Rollouts that are there and not suspended: the run's own, and those that joined, by their rank's process."""
        found = train.ranks()[1:]
        for joiner in self._joiners:
            if joiner.poll() is None:
                found += psutil.Process(joiner.pid).children()
        return [process for process in found if process.is_running() and process.status() not in ("stopped", "zombie")]


def chaos(root: Path, seed: int, events: int) -> dict[str, Any]:
    """A calm run and a stormy one of the same configuration; what came of it."""
    started = commands(root)
    start, steps = next(started), max(4, STEPS_PER_EVENT * events)
    try:
        calm = start(*WORDS, *RUN, "allocation.rollouts=1", f"max_rl_steps={steps}", fork=True)
        assert calm.finish() == 0, calm.stderr
        train = start(*WORDS, *RUN, "allocation.rollouts=2", f"max_rl_steps={steps}", fork=True)
        storm = Storm(start, seed, events, steps)
        storm.rage(train)
        noted = train.rows("events.jsonl")
        return {
            "seed": seed,
            "bit_equal": published(train) == published(calm),
            "trainer_restarts": sum(row["kind"] == "restart" for row in noted),
            "rl_steps": train.summary["rl_steps"],
            "events": storm.events,
            **{kind: [row.get("cause", row["rank"]) for row in noted if row["kind"] == kind] for kind in NOTED},
        }
    finally:
        next(started, None)


NOTED = ("lost", "left", "joined")


def main(words: Sequence[str]) -> int:
    """Exit code: 0 when the weights are equal and no trainer began again."""
    settings = {"seed": 0, "events": 20} | {key: int(value) for key, value in (word.split("=") for word in words)}
    with tempfile.TemporaryDirectory() as directory:
        found = chaos(Path(directory), settings["seed"], settings["events"])
    OUTPUT.mkdir(parents=True, exist_ok=True)
    path = OUTPUT / f"seed-{settings['seed']}-events-{settings['events']}.json"
    path.write_text(json.dumps(found, indent=2) + "\n")
    print(
        f"{len(found['events'])} events in {found['rl_steps']} RL steps: bit_equal {found['bit_equal']}",
        file=sys.stderr,
    )
    print(os.fspath(path.absolute()))
    return int(not found["bit_equal"] or found["trainer_restarts"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
