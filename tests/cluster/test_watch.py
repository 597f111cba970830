"""What the launcher makes of deaths, silence, signals and rollouts that come and go.

Its own watch runs here on a real store. The test moves the ranks and the clock.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from digenrl.cluster import launcher, vitals
from digenrl.cluster.claims import StoredClaims, note_version
from digenrl.cluster.control import Control
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.launcher import MACHINE_LOST, Launch, RunOutcome
from digenrl.cluster.limits import Limits
from digenrl.cluster.members import Members, end_key
from digenrl.cluster.store import StoreClient, StoreServer
from digenrl.cluster.vitals import heartbeat_key, watch_key
from digenrl.schedule import ScheduleSpec, version_queue
from digenrl.schedule.claims import Claims

TASKS = version_queue(ScheduleSpec(2, 2, 2, 4, 3), 0, 0)
LIMITS = Limits(stage_factor=None, silent_s=8.0, start_s=20.0, stage_floor_s=40.0, absent_s=5.0)
TERM, LAST = signal.SIGTERM, "the last rollout"
KILLED = "was killed by signal 9 (SIGKILL; sent from outside, not for lack of memory)"


class Rank:
    """A rank as the launcher sees it."""

    def __init__(self, run: Run, pid: int | None) -> None:
        self.run, self.pid = run, pid
        self.exitcode: int | None = None
        self.killed: float | None = None
        """Second at which the launcher killed it."""
        self.sentinel = os.dup(run.ready)
        run.files.append(self.sentinel)

    def kill(self) -> None:
        self.killed, self.exitcode = self.run.now, -9

    def join(self, timeout: float | None = None) -> None:
        pass


class Run:
    """A run whose seconds and events the test decides.

    Args:
        script: second -> what happens then.
        pid: process id of the first rank; None: they are on another machine.
        silent: ranks without heartbeat.
        every: seconds between two looks of the launcher.
    """

    def __init__(
        self,
        store: StoreServer,
        handshake: Handshake,
        folder: Path,
        script: Mapping[float, Callable[[Run], object]],
        trainers: int = 1,
        rollouts: int = 1,
        pid: int | None = 1000,
        silent: Collection[int] = (),
        every: float = 0.25,
        **terms: Any,
    ) -> None:
        self.now, self._every, self._script, self.server = 0.0, every, dict(script), store
        self.handshake = handshake
        self.control = Control(StoreClient(store.host, store.port, handshake), -1)
        self.silent, self.suspended, self.stuck = set(silent), set[int](), set[int]()
        self.guests: dict[int, StoreClient] = {}
        """Rollouts that joined."""
        self.seen: dict[str, float] = {}
        """Key of the store -> second at which the launcher had set it."""
        self.states: dict[int, str] = {}
        self.spec = Launch(
            trainers, rollouts, lambda *_: None, folder, limits=LIMITS, on_tick=self._tick,
            stop_grace=lambda: 3.0, stop_save_s=6.0, **terms,
        )  # fmt: skip
        reading, writing = os.pipe()
        os.write(writing, b".")
        self.files, self.ready = [reading, writing], reading  # nobody waits for a rank
        self.ranks = {rank: Rank(self, pid and pid + rank) for rank in range(trainers + rollouts)}

    def _look(self) -> None:
        for key in ("abort", "stop", "give_up", "leave/1", "leave/2", "signal"):
            if self.control.get(key) is not None:
                self.seen.setdefault(key, self.now)

    def _tick(self, states: Callable[[], dict[int, str]]) -> None:
        self.states = states()
        self._look()
        self.now += self._every
        assert self.now < 200.0, "the watch does not end"
        for rank in self.ranks.keys() - self.silent:
            self.control.set(heartbeat_key(rank), json.dumps([self.now, []]))
        for rank in self.guests.keys() - self.silent:
            self.control.set(watch_key(rank), str(self.now))
        for rank in self.guests.keys() - self.silent - self.stuck:
            self.control.set(heartbeat_key(rank), json.dumps([self.now, []]))
        for second in [s for s in self._script if s <= self.now]:
            self._script.pop(second)(self)

    def ends(self) -> RunOutcome:
        self.members = Members(
            self.control, self.server, self.spec, self.spec.run_dir, LIMITS, self.ranks
        )
        watch = launcher._Watch(self.spec, self.ranks, self.control, self.members)  # type: ignore[arg-type]
        found = watch.watch_ranks()
        self._look()
        self.seen["end"] = self.now
        return found

    def events(self) -> list[tuple[str, Any]]:
        path = self.spec.run_dir / "events.jsonl"
        rows = map(json.loads, path.read_text().splitlines() if path.exists() else ())
        return [(row["kind"], row.get("rank", row.get("message"))) for row in rows]


def takes(rank: int) -> Callable[[Run], object]:
    """Claim a task of step 0."""
    return lambda run: Claims(StoredClaims(run.control), rank).take_next_task(
        0, TASKS, range(len(TASKS))
    )


def die(rank: int, code: int = -9, cause: str = "") -> Callable[[Run], None]:
    def happen(run: Run) -> None:
        if cause:
            run.control.set(f"cause/{rank}", cause)
        run.ranks[rank].exitcode = code

    return happen


def leave(*ranks: int) -> Callable[[Run], None]:
    def happen(run: Run) -> None:
        for rank in ranks:
            run.control.set(f"left/{rank}", "1")
            run.ranks[rank].exitcode = 0

    return happen


def sets(key: str, value: str) -> Callable[[Run], None]:
    return lambda run: run.control.set(key, value)


def both(*events: Callable[[Run], object]) -> Callable[[Run], object]:
    return lambda run: [event(run) for event in events]


def signalled(run: Run) -> None:
    run.spec.signals.count += 1
    run.spec.signals.number = run.spec.signals.number or TERM


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    handshake = Handshake()
    server = StoreServer(socket.create_server(("127.0.0.1", 0)), handshake)
    runs: list[Run] = []

    def made(script: Mapping[float, Callable[[Run], object]], **options: Any) -> Run:
        runs.append(Run(server, handshake, tmp_path, script, **options))
        note_version(runs[-1].control, 0)
        monkeypatch.setattr(vitals.time, "monotonic", lambda: runs[-1].now)
        return runs[-1]

    pause = time.sleep

    def sleep(seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():
            runs[-1].now += seconds
        else:
            pause(seconds)

    monkeypatch.setattr(launcher.time, "sleep", sleep)
    monkeypatch.setattr(vitals, "cpu_seconds", lambda pid: 0.0)
    monkeypatch.setattr(
        vitals, "is_suspended", lambda pid: pid is not None and pid - 1000 in runs[-1].suspended
    )
    yield made
    monkeypatch.undo()
    for run in runs:
        for descriptor in run.files:
            os.close(descriptor)
    server.close()


def join(rank: int) -> Callable[[Run], None]:
    def happen(run: Run) -> None:
        own = replace(run.handshake, rank=rank)
        run.guests[rank] = StoreClient(run.server.host, run.server.port, own)
        Control(run.guests[rank], rank).add_joined_rank(rank)

    return happen


def part(rank: int, said: str = "") -> Callable[[Run], None]:
    def happen(run: Run) -> None:
        if said:
            run.control.set(end_key(rank), said)
        run.guests.pop(rank)._socket.close()
        while rank in run.server.connected_ranks():
            os.sched_yield()

    return happen


def heard(rank: int) -> Callable[[Run], None]:
    return lambda run: run.silent.remove(rank)


def sleeps(seconds: float, *after: Callable[[Run], object]) -> Callable[[Run], None]:
    """The launcher itself is suspended so long."""

    def happen(run: Run) -> None:
        run.now += seconds
        run._script[run.now + 0.25] = both(*after)

    return happen


def quiet(rank: int) -> Callable[[Run], None]:
    return lambda run: run.silent.add(rank)


FIRST = sets("first_step", "1")
SAVED = "; the trainers had not saved when they were killed"
GONE = f"rank 1 (rollout) {KILLED}"


def done(*ranks: int) -> Callable[[Run], object]:
    return both(sets("done", "1"), leave(*ranks))


def failed(cause: str) -> tuple[str, str, int, bool]:
    return "failed", cause, 1, True


def stopped(number: signal.Signals, more: str = "") -> tuple[str, str, int, bool]:
    return "stopped", f"signal {number.name}{more}", 128 + number, False


ENDS: dict[str, tuple[Any, dict[str, Any], Any, dict[Any, float]]] = {
    "well": ({2: done(0, 1)}, {}, ("completed", None, 0, False), {}),
    "by itself": (
        {2: both(sets("stop", "no rewards"), done(0, 1))}, {}, ("stopped", "no rewards", os.EX_TEMPFAIL, False), {},
    ),
    "trainer killed": ({2: die(0)}, {}, failed(f"rank 0 (trainer) {KILLED}"), {"abort": 2.0, 1: 6.25}),
    "trainer raised": ({2: die(0, 1, "raised E")}, {}, failed("rank 0 (trainer) raised E"), {"abort": 2.0, 1: 6.25}),
    "trainer exits": (
        {2: die(0, 0)}, {},
        failed("rank 0 (trainer) exited with code 0 before the run ended; see logs/rank-000.log"), {"abort": 2.0},
    ),
    "killed comes first": ({2: both(die(0, 1, "lost its peer"), die(1))}, {"max_lost": 0}, failed(GONE), {"abort": 2.0}),
    "told before, exits": (
        {2: both(sets("abort", "first"), die(0, 0))}, {},
        failed("rank 0 (trainer) exited with code 0 before the run ended; see logs/rank-000.log"), {1: 6.25},
    ),
    "told before": ({2: both(sets("abort", "first"), die(0, 1, "late"))}, {}, failed("first"), {1: 6.25}),
    "told before, all leave": ({2: both(sets("abort", "first"), leave(0, 1))}, {}, failed("first"), {"end": 2.0}),
    "told when done": ({2: both(sets("abort", "late"), done(0, 1))}, {}, ("completed", None, 0, False), {}),
    "after a stop": ({1: sets("stop", "x"), 2: die(0)}, {}, ("failed", f"rank 0 (trainer) {KILLED}", 1, False), {}),
    "elsewhere": (
        {2: die(0)}, {"pid": None},
        failed("rank 0 (trainer) is gone with its process; see logs/rank-000.log"), {"abort": 2.0},
    ),
    "elsewhere, with all": (
        {2: die(0, MACHINE_LOST)}, {"pid": None},
        failed("rank 0 (trainer) is gone with its machine; see logs/rank-000.log"), {"abort": 2.0},
    ),
    "elsewhere, in order": (
        {2: die(0, 0)}, {"pid": None},
        failed("rank 0 (trainer) exited with code 0 before the run ended; see logs/rank-000.log"), {"abort": 2.0},
    ),
    "one of two": ({2: die(1), 4: done(0, 2)}, {"rollouts": 2}, ("completed", None, 0, False), {}),
    "the last": ({2: die(1)}, {}, failed(f"{GONE}, {LAST}"), {"stop": 2.0, 0: 2.0}),
    "the last, trained": ({1: FIRST, 2: die(1)}, {}, failed(f"{GONE}, {LAST}"), {"give_up": 2.25, 0: 8.5}),
    "the last, patient": (
        {2: die(1)}, {"patience_s": 4.0},
        failed(f"{GONE}, {LAST}; no other joined within 4 s (allocation.patience_s)"), {"stop": 6.0, 0: 6.0},
    ),
    "the last, hopeless": (
        {2: die(1, 1, "raised E")}, {"patience_s": 4.0}, failed("rank 1 (rollout) raised E"), {"stop": 2.0},
    ),
    "too few": (
        {2: die(1)}, {"rollouts": 2, "fewest": 2},
        failed(f"{GONE}, and 1 are left of at least 2 (allocation.rollouts.min)"), {"stop": 2.0},
    ),
    "too many": ({2: die(1), 4: die(2)}, {"rollouts": 3, "max_lost": 1}, failed(GONE.replace("1", "2", 1)), {"abort": 4.0}),
    "stopped": ({1: FIRST, 2: signalled, 4: done(0, 1)}, {}, stopped(TERM), {"stop": 2.0}),
    "passed on": ({1: FIRST, 2: sets("signal", "10"), 4: done(0, 1)}, {}, stopped(signal.SIGUSR1), {"stop": 2.0}),
    "stopped at once": ({2: signalled}, {}, stopped(TERM), {0: 2.0, 1: 2.0}),
    "stopped, slow": ({1: FIRST, 2: signalled}, {}, stopped(TERM, SAVED), {"give_up": 5.25, 0: 11.5}),
    "stopped twice": ({1: FIRST, 2: signalled, 3: signalled}, {}, stopped(TERM, SAVED), {"give_up": 3.0, 0: 9.25}),
    "stopped thrice": (
        {1: FIRST, 2: signalled, 3: both(signalled, signalled)}, {}, stopped(TERM, SAVED), {0: 3.0, 1: 3.0},
    ),
    "stopped, rollout stays": ({1: FIRST, 2: signalled, 4: leave(0)}, {}, stopped(TERM), {"stop": 2.0, 1: 8.25}),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS)
def test_how_a_run_ends_and_when(make: Callable[..., Run], case: str) -> None:
    """The last field: when a key of the store was set, or when a rank was killed."""
    script, options, outcome, wanted = ENDS[case]
    run = make(script, **options)
    assert astuple(run.ends()) == outcome
    killed = {rank: each.killed for rank, each in run.ranks.items() if each.killed is not None}
    seen = {**run.seen, **killed}
    assert {key: seen.get(key) for key in wanted} == wanted


def test_the_launcher_sleeps_until_a_rank_ends(
    make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = {1: sets("state/0", "training"), 2: die(1), 3: done(0, 2)}
    run, waits = make(script, rollouts=2), list[tuple[int, float]]()
    monkeypatch.setattr(
        launcher.connection, "wait", lambda ends, timeout: waits.append((len(ends), timeout))
    )
    assert run.ends().status == "completed"
    assert waits == [(3, 0.2)] * 8 + [(2, 0.2)] * 4
    assert run.states == {0: "training", 1: "lost", 2: "starting"}


ASKS = sets("ask/1", "15")
TWICE = "task 0 of step 0 (group 0) lost 2 owners, the last being rank 2"
MORE: dict[str, tuple[Any, dict[str, Any], Any, dict[Any, float], list[tuple[str, Any]]]] = {
    "leaves": (
        {2: ASKS, 4: leave(1), 5: die(2), 6: done(0, 3)}, {"rollouts": 3, "max_lost": 1},
        ("completed", None, 0, False), {"leave/1": 2.75}, [("left", 1), ("lost", 2)],
    ),
    "may not leave": (
        {1: FIRST, 2: ASKS, 4: done(0, 1)}, {"max_lost": 0}, stopped(TERM), {"signal": 2.0, "leave/1": None}, [],
    ),
    "asks in a stop": (
        {1: FIRST, 2: ASKS, 2.25: signalled, 4: done(0, 1)}, {}, stopped(TERM), {"leave/1": None}, [],
    ),
    "asks in a stop that a rank passed on": (
        {1: FIRST, 2: ASKS, 2.25: sets("signal", "15"), 4: done(0, 1)}, {}, stopped(TERM), {"leave/1": None}, [],
    ),
    "the last leaves": (
        {2: ASKS, 4: leave(1)}, {},
        ("failed", f"rank 1 (rollout) left: signal SIGTERM, {LAST}", 1, False), {"leave/1": 2.75}, [("left", 1)],
    ),
    "another joins": (
        {2: die(1), 3: join(2), 9: both(done(0), part(2))}, {"patience_s": 4.0},
        ("completed", None, 0, False), {},
        [("lost", 1), ("warning", f"{GONE}, {LAST}; waiting 4 s for another (digenrl join)"), ("joined", 2)],
    ),
    "a joined one ends": (
        {1: join(2), 3: part(2), 4: both(join(3)), 5: part(3, "ran into a wall"), 6: done(0, 1)}, {},
        ("completed", None, 0, False), {}, [("joined", 2), ("lost", 2), ("joined", 3), ("lost", 3)],
    ),
    "a joined one too many": (
        {1: join(2), 3: part(2, "ran into a wall")}, {"max_lost": 0},
        failed("rank 2 (rollout) ran into a wall"), {"abort": 3.0}, [("joined", 2)],
    ),
    "a joined one is out of reach": (
        {1: join(2), 3: quiet(2)}, {"max_lost": 0},
        failed("rank 2 (rollout) stopped responding (its machine gave no sign of life for 5 s)"), {"abort": 8.25},
        [("joined", 2)],
    ),
    "a task is lost twice": (
        {1: takes(1), 2: die(1), 3: takes(2), 4: die(2)}, {"rollouts": 3},
        failed(f"{TWICE}, which {KILLED}: the task itself is the likely cause. Look at its prompt and its reward."),
        {"abort": 4.0},
        [("lost", 1)],
    ),
    "machines are lost with their tasks": (
        {
            1: takes(1), 2: die(1, MACHINE_LOST), 3: takes(2), 4: die(2, MACHINE_LOST),
            5: both(join(4), takes(4)), 6: part(4), 7: both(join(5), takes(5)), 8: quiet(5),
            16: both(takes(3), part(5)), 17: done(0, 3),
        },
        {"rollouts": 3, "pid": None}, ("completed", None, 0, False), {},
        [("lost", 1), ("lost", 2), ("joined", 4), ("lost", 4), ("joined", 5), ("lost", 5)],
    ),
    "a task is lost twice elsewhere": (
        {1: takes(1), 2: die(1), 3: takes(2), 4: die(2)}, {"rollouts": 3, "pid": None},
        failed(
            f"{TWICE}, which is gone with its process; see logs/rank-002.log: the task itself is the likely cause. "
            "Look at its prompt and its reward."
        ),
        {"abort": 4.0}, [("lost", 1)],
    ),
    "a task is lost twice by words of watchers": (
        {1: both(join(2), takes(2)), 3: part(2, "was killed"), 4: both(join(3), takes(3)), 5: part(3, "was killed")},
        {},
        failed(f"{TWICE[:-1]}3, which was killed: the task itself is the likely cause. Look at its prompt and its reward."),
        {"abort": 5.0}, [("joined", 2), ("lost", 2), ("joined", 3)],
    ),
    "a task is lost twice by errors": (
        {
            1: both(join(2), takes(2)), 3: both(sets("cause/2", "raised E"), part(2)),
            4: both(join(3), takes(3)), 5: both(sets("cause/3", "raised E"), part(3)),
        },
        {},
        failed(f"{TWICE[:-1]}3, which raised E: the task itself is the likely cause. Look at its prompt and its reward."),
        {"abort": 5.0}, [("joined", 2), ("lost", 2), ("joined", 3)],
    ),
    "a joined one stays too long": (
        {1: join(2), 3: done(0, 1)}, {}, ("completed", None, 0, False), {"end": 13.0}, [("joined", 2)],
    ),
    "a joined one computes nothing": (
        {1: join(2), 2: lambda run: run.stuck.add(2)}, {"max_lost": 0},
        failed("rank 2 (rollout) stopped responding (it gave no sign of life for 40 s)"), {"abort": 43.0},
        [("joined", 2)],
    ),
    "dies while it may leave": (
        {2: ASKS, 4: die(1), 6: done(0, 2)}, {"rollouts": 2}, ("completed", None, 0, False), {"leave/1": 2.75},
        [("lost", 1)],
    ),
    "a trainer waits in silence": (
        {2: both(die(1), quiet(0)), 20: both(join(2), heard(0)), 22: both(done(0), part(2))}, {"patience_s": 30.0},
        ("completed", None, 0, False), {},
        [("lost", 1), ("warning", f"{GONE}, {LAST}; waiting 30 s for another (digenrl join)"), ("joined", 2)],
    ),
    "a launcher that slept": (
        {
            1: both(join(2), quiet(2)), 3.5: sleeps(50.0, heard(2)),
            60: quiet(0), 66: sleeps(50.0, heard(0)),
            120: lambda run: run.suspended.add(1), 121.5: sleeps(50.0, lambda run: run.suspended.clear()),
            180: both(done(0, 1), part(2)),
        }, {}, ("completed", None, 0, False), {}, [("joined", 2)],
    ),
    "silent": (
        {2: quiet(0)}, {}, failed("rank 0 (trainer) stopped responding (it gave no sign of life for 8 s)"),
        {0: 11.0, 1: 15.5}, [],
    ),
    "silent elsewhere": (
        {2: quiet(0)}, {"pid": None},
        failed("rank 0 (trainer) stopped responding (it gave no sign of life for 40 s)"), {0: 43.0}, [],
    ),
    "never came": (
        {}, {"pid": None, "silent": {0}},
        failed("rank 0 (trainer) has not joined (no sign of life for 20 s; raise limits.start_s if it only needs longer)"),
        {0: 21.0}, [],
    ),
    "suspended": (
        {2: lambda run: run.suspended.add(1)}, {"max_lost": 0},
        failed("rank 1 (rollout) stopped responding (process 1001 is suspended)"), {1: 5.0}, [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MORE)
def test_who_comes_goes_and_falls_silent(make: Callable[..., Run], case: str) -> None:
    script, options, outcome, wanted, events = MORE[case]
    run = make(script, **options)
    assert astuple(run.ends()) == outcome
    killed = {rank: each.killed for rank, each in run.ranks.items() if each.killed is not None}
    seen = {**run.seen, **killed}
    assert {key: seen.get(key) for key in wanted} == pytest.approx(wanted)
    assert run.events() == events
    assert run.control.get("ranks") == str(len(run.ranks))
