"""A storm over one run, at random steps of a seed. Rollouts are killed, suspended and asked to
leave, and others join. The cable to a rollout on another machine is cut or slow. The disk is full,
the reward service dies. At the end the weights must be those of the calm run, bit for bit, and no
trainer may have begun again.

    make chaos ARGS="seed=11 events=20"        (python -m tests.chaos seed=11 events=20)

The last line of standard output is the path of a JSON file: `bit_equal`, `trainer_restarts`,
`events`, `skipped` (what this machine does not permit, and why), and what the run noted while its
disk took it (`lost`, `left`, `joined`).
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

import digenrl.extensions.tasks.digits  # noqa: F401  (diffusers loads once, here, and not in every process)
from digenrl import run  # noqa: F401
from tests.namespaces import Cable, NotHere, cable, inside
from tests.storm import published
from tests.training import PATIENCE_S, SMALL, Train, commands

WORDS = (
    *SMALL,
    "schedule=gap_tsp_tag",
    "schedule.tsp.batch=1",
    "sampling.steps=8",
    "callbacks.checkpoint.every=1000",
)
RUN = (
    "allocation.trainers=1",
    "allocation.patience_s=60",
    "allocation.max_restarts=3",
    "limits.absent_s=3",
)
STEPS_PER_EVENT = 2
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM}
MOST = 3
"""Rollouts at a time: a small machine runs them all."""
DISK_MIB = 48
FULL_S, DEAD_S, SLOW_S, CUT_S = 1.0, 1.5, 2.0, 5.0
"""How long it lasts, at most: cuts are both shorter and longer than `limits.absent_s`."""
OUTPUT = Path("outputs/chaos")
Start = Callable[..., Train]


class Place:
    """The surroundings of a run: its disk, its reward service, and the cable to another machine.
    Each of them can fail.

    Args:
        start: starts commands (`tests.training.commands`).
    """

    def __init__(self, start: Start, root: Path, held: ExitStack) -> None:
        self._start, self.skipped = start, dict[str, str]()
        self.cable: Cable | None = None
        self.disk: Path | None = None
        try:
            self.disk = held.enter_context(_disk(root / "disk"))
        except NotHere as error:
            self.skipped["full disk"] = str(error)
        try:
            self.cable = held.enter_context(cable())
        except NotHere as error:
            self.skipped["cut"] = self.skipped["slow"] = str(error)
        host = "127.0.0.1" if self.cable is None else self.cable.host
        with socket.create_server((host, 0)) as probe:
            self._address = f"{host}:{probe.getsockname()[1]}"
        self._serve()

    @property
    def words(self) -> list[str]:
        """Words of a run in these surroundings."""
        found = [
            "+reward.rewards.judge_a.placement=http",
            f"reward.urls={{judge_a:['http://{self._address}']}}",
        ]
        found += [] if self.disk is None else [f"output_root={self.disk}"]
        return found + ([] if self.cable is None else [f"network.interface={self.cable.interface}"])

    @property
    def weather(self) -> dict[str, tuple[Callable[[float], None], float]]:
        """Kind of event -> what makes it happen for some seconds, and the most of them."""
        found = {"dead reward": (self.reward_dies, DEAD_S)}
        if self.disk is not None:
            found["full disk"] = (self.disk_is_full, FULL_S)
        return (
            found
            if self.cable is None
            else found | {"cut": (self.cable.cut, CUT_S), "slow": (self.cable.slow, SLOW_S)}
        )

    @property
    def join_words(self) -> list[str]:
        """Words of a rollout that joins such a run."""
        return [f"confirm_hosts=['{self._address}']"]

    def _serve(self) -> None:
        host, port = self._address.split(":")
        words = ("reward=digits", "name=judge_a", f"host={host}", f"port={port}")
        self._service = self._start(*words, tiny=(), fork=True, command="serve-reward")
        said = self._service.root / "stdout"
        while not said.is_file() or "serving at" not in said.read_text():
            assert self._service.poll() is None, self._service.stderr
            time.sleep(0.02)

    def reward_dies(self, seconds: float) -> None:
        """Nobody answers for so long, and then another process does."""
        os.kill(self._service.pid, signal.SIGKILL)
        time.sleep(seconds)
        self._serve()

    def disk_is_full(self, seconds: float) -> None:
        """Not a page is free, for so long."""
        assert self.disk is not None
        with (self.disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass
        time.sleep(seconds)
        (self.disk / "filler").unlink()


@contextmanager
def _disk(path: Path) -> Iterator[Path]:
    """A file system in memory.

    Raises:
        NotHere: it cannot be mounted.
    """
    path.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(path)]
    made = subprocess.run(mount, capture_output=True, text=True)
    if made.returncode:
        raise NotHere(f"{' '.join(mount)}: {made.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


class Storm:
    """What happens to one run.

    Args:
        steps: RL steps of the run; events are spread over them.
    """

    def __init__(self, start: Start, place: Place, seed: int, events: int, steps: int) -> None:
        self._start, self._place, self._chance = start, place, random.Random(seed)
        self._steps, self._count = steps, events
        self._joiners: list[Train] = []
        self._far: list[Train] = []
        """Joiners at the other end of the cable."""
        self.events: list[dict[str, Any]] = []

    def rage(self, train: Train) -> None:
        """Let every event happen at its step, then see the run to its end."""
        train.wait_for_step(1)
        for number in range(self._count):
            self._wait_for_step(train, 1 + number * (self._steps - 2) // self._count)
            time.sleep(self._chance.uniform(0.0, 0.3))
            self._strike(train)
        self._wait_for_step(train, self._steps)
        assert train.finish() == 0, train.stderr
        for joiner in self._joiners:
            joiner.finish()

    def _wait_for_step(self, train: Train, step: int) -> None:
        """Wait until `step` RL steps are finished. A run that has lost every rollout waits, so a
        new one joins."""
        deadline = time.monotonic() + PATIENCE_S
        while not any(
            row["kind"] == "step" and row["rl_step"] >= step for row in train.rows("metrics.jsonl")
        ):
            if train.poll() is not None:  # the full disk may have taken the last line
                return
            assert time.monotonic() < deadline, f"no step {step}: {train.stderr}"
            begin = any(joiner.poll() is None and not _ranks(joiner) for joiner in self._joiners)
            if not begin and not self._victims(train):
                self._join(train)
            time.sleep(0.05)

    def _strike(self, train: Train) -> None:
        victims = self._victims(train)
        weather = self._place.weather
        if all(joiner.poll() is not None for joiner in self._far):  # nobody stands at the other end
            weather = {kind: it for kind, it in weather.items() if kind not in ("cut", "slow")}
        kinds = [
            *(SIGNALS if len(victims) > 1 else ()),
            *(["join"] if len(victims) < MOST else ()),
            *weather,
        ]
        event: dict[str, Any] = {"event": (kind := self._chance.choice(kinds)), "time": time.time()}
        self.events.append(event)
        if kind in SIGNALS:
            victim = self._chance.choice(victims)
            event["process"] = victim.pid
            victim.send_signal(SIGNALS[kind])
        elif kind == "join":
            event["far"] = self._join(train)
        else:
            happen, most = weather[kind]
            event["seconds"] = self._chance.uniform(0.1, 1.0) * most
            happen(event["seconds"])

    def _join(self, train: Train) -> bool:
        """Have one more rollout join; whether it stands at the other end of the cable: every second
        one."""
        far = self._place.cable is not None and len(self._joiners) % 2 == 0

        def begin() -> Train:
            words = (f"run={train.run_dir}", *self._place.join_words)
            return self._start(*words, tiny=(), fork=True, command="join")

        joiner = (
            inside(self._place.cable.namespace, begin) if far and self._place.cable else begin()
        )
        self._joiners.append(joiner)
        if far:
            self._far.append(joiner)
        return far

    def _victims(self, train: Train) -> list[psutil.Process]:
        """Rollouts that are there and not suspended: the run's own, and those that joined, by their
        rank's process."""
        found = train.ranks()[1:]
        for joiner in self._joiners:
            found += _ranks(joiner)
        return [
            process
            for process in found
            if process.is_running() and process.status() not in ("stopped", "zombie")
        ]


def _ranks(joiner: Train) -> list[psutil.Process]:
    """What a joiner that is there has started."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(joiner.pid).children() if joiner.poll() is None else []
    return []


def chaos(root: Path, seed: int, events: int) -> dict[str, Any]:
    """A calm run and a stormy one of the same configuration; what came of it."""
    started = commands(root)
    start, steps = next(started), max(4, STEPS_PER_EVENT * events)
    with ExitStack() as held:
        held.callback(next, started, None)
        os.environ["DIGENRL_REWARD_TOKEN"] = (
            f"storm-{os.getpid()}"  # off loopback a reward service wants one
        )
        held.callback(os.environ.pop, "DIGENRL_REWARD_TOKEN")
        calm = start(*WORDS, *RUN, "allocation.rollouts=1", f"max_rl_steps={steps}", fork=True)
        assert calm.finish() == 0, calm.stderr
        place = Place(start, root, held)
        train = start(
            *WORDS, *RUN, *place.words, "allocation.rollouts=2", f"max_rl_steps={steps}", fork=True
        )
        if place.disk is not None:
            (train.root / "outputs").symlink_to(place.disk)
        storm = Storm(start, place, seed, events, steps)
        storm.rage(train)
        if place.cable is not None and place.cable.lossy is not None:
            place.skipped["delay and loss"] = place.cable.lossy
        noted, weights = train.rows("events.jsonl"), "checkpoints/last/policy.safetensors"
        equal = (
            published(train).items() <= published(calm).items()
        )  # the full disk took some of the lines
        return {
            "seed": seed,
            "bit_equal": equal
            and (train.run_dir / weights).read_bytes() == (calm.run_dir / weights).read_bytes(),
            "trainer_restarts": sum(row["kind"] == "restart" for row in noted),
            "rl_steps": train.summary["rl_steps"],
            "events": storm.events,
            "skipped": place.skipped,
            **{
                kind: [row.get("cause", row["rank"]) for row in noted if row["kind"] == kind]
                for kind in NOTED
            },
        }


NOTED = ("lost", "left", "joined")


def main(words: Sequence[str]) -> int:
    """Exit code: 0 when the weights are equal and no trainer began again."""
    settings = {"seed": 0, "events": 20} | {
        key: int(value) for key, value in (word.split("=") for word in words)
    }
    with tempfile.TemporaryDirectory() as directory:
        found = chaos(Path(directory), settings["seed"], settings["events"])
    OUTPUT.mkdir(parents=True, exist_ok=True)
    path = OUTPUT / f"seed-{settings['seed']}-events-{settings['events']}.json"
    path.write_text(json.dumps(found, indent=2) + "\n")
    print(
        f"{len(found['events'])} events in {found['rl_steps']} RL steps: bit_equal "
        f"{found['bit_equal']}",
        *(f"skipped: {kind} ({why})" for kind, why in found["skipped"].items()),
        sep="\n",
        file=sys.stderr,
    )
    print(os.fspath(path.absolute()))
    return int(not found["bit_equal"] or found["trainer_restarts"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
