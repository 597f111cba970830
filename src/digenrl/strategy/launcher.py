"""The launcher: hosts the control store, forks the ranks, watches them, and cleans up whatever happens.

It is never a rank, so no rank's death takes the store with it. Ranks are forked after the heavy imports (14 MB a rank
instead of 250 MB and seconds). A rank cannot outlive the launcher (PR_SET_PDEATHSIG), and the launcher does not leave
before every rank is gone.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from digenrl.strategy.control import Aborted, Control, host_store, join_store
from digenrl.strategy.world import Session, World

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Parameters of glibc's mallopt(3)."""
ABORT_GRACE_S = 4.0
"""Time that ranks get to leave by themselves after a failure, before SIGKILL."""
EXIT_STOPPED = 75
"""Exit code of a run that asked to stop itself (EX_TEMPFAIL: fix the cause, then resume)."""
STOPPED_LIMIT_S = 3.0
"""A rank in process state T (SIGSTOP) for this long counts as dead."""


@dataclass
class Outcome:
    """How a run ended. Grows while the launcher watches, hence not frozen."""

    status: str = "completed"
    """completed | stopped | failed"""
    cause: str | None = None
    exit_code: int = 0


@dataclass(frozen=True)
class Launch:
    """What to start.

    `rank_main(world, session)` runs in each forked rank; an exception there fails the run with its text as the cause.
    """

    rank_main: Callable[[World, Session], None]
    trainers: int
    rollouts: int
    run_dir: Path
    stop_grace_s: float = 5.0
    """Ctrl-C: how long ranks may take to finish the step in progress and save, before they are killed."""
    host: str = "127.0.0.1"
    on_tick: Callable[[Callable[[], dict[int, str]]], None] = field(default=lambda states: None)
    """Called several times per second with a function that reads what each rank does (the live display)."""
    on_end: Callable[[], None] = field(default=lambda: None)
    """Called once when every rank is gone, while the store still answers."""


def launch(spec: Launch) -> Outcome:
    """Start every rank, watch them to the end, and say how it ended. No process of the run is left behind.

    Raises:
        OSError: the control store could not be hosted.
    """
    store = host_store(spec.host)
    prefix, epoch = f"run-{secrets.token_hex(4)}", time.time()
    token = secrets.token_hex(16)
    logs = spec.run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    ranks: dict[int, BaseProcess] = {}
    with _Signals() as signals:
        for rank in range(spec.trainers + spec.rollouts):
            world = World(rank, spec.trainers, spec.rollouts, local_rank=rank)
            session = Session(spec.host, store.port, prefix, token, spec.run_dir, epoch, spec.host)
            process = multiprocessing.get_context("fork").Process(
                target=_child, args=(spec.rank_main, world, session, logs / f"rank-{rank:03d}.log", os.getpid())
            )
            process.start()
            ranks[rank] = process
        control = Control(join_store(spec.host, store.port, prefix), rank=-1)
        try:
            return _watch(spec, ranks, control, signals)
        finally:
            _kill(ranks)
            spec.on_end()


def _child(
    rank_main: Callable[[World, Session], None], world: World, session: Session, log: Path, launcher: int
) -> None:
    """Body of a forked rank: die with the launcher, keep the terminal free, report what went wrong."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died between fork and prctl
        os._exit(1)
    keep_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to everybody; the launcher decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code = 0
    try:
        rank_main(world, session)
    except Aborted as error:
        print(error, file=sys.stderr)
        code = 1
    except BaseException as error:
        traceback.print_exc()
        _report(world, session, error)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # interpreter shutdown would wait for threads that wait for peers


def keep_memory() -> None:
    """Let glibc keep freed memory: weights and trajectories of many MB come and go in every step, and faulting their
    pages in again takes as long as sending them (benchmarks/publish.py). Other C libraries decide for themselves."""
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest that glibc takes
        library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        library.mallopt(_M_ARENA_MAX, 1)  # a thread's own arena would give its pages back all the same


def _report(world: World, session: Session, error: BaseException) -> None:
    """Put this rank's error on the store, unless an earlier cause is there or the store is gone."""
    try:
        control = Control(join_store(session.store_host, session.store_port, session.prefix), world.rank)
        control.abort(f"rank {world.rank} ({world.role}) raised {type(error).__name__}: {error}")
    except RuntimeError:
        print("the control store is gone; the launcher must have died", file=sys.stderr)


def _watch(spec: Launch, ranks: dict[int, BaseProcess], control: Control, signals: _Signals) -> Outcome:
    """Wait for the ranks; turn deaths, hangs and signals into one outcome with one cause."""
    outcome = Outcome()
    deadline, killed = float("inf"), False
    stopped_since: dict[int, float] = {}

    def states() -> dict[int, str]:
        return {rank: control.get(f"state/{rank}") or "starting" for rank in ranks}

    def fail(cause: str) -> None:
        nonlocal deadline
        if outcome.status != "failed":
            outcome.status, outcome.cause, outcome.exit_code = "failed", cause, 1
            control.abort(cause)
            deadline = min(deadline, time.monotonic() + ABORT_GRACE_S)

    while True:
        codes = {rank: process.exitcode for rank, process in ranks.items()}
        dead = {rank: code for rank, code in codes.items() if code}
        if dead and not killed:  # a rank killed by a signal could not speak: its peers' lost connections come second
            rank, code = min(dead.items(), key=lambda item: (item[1] >= 0, item[0]))
            fail(_death(rank, spec, code) if code < 0 else control.get("abort") or _death(rank, spec, code))
        alive = {rank: ranks[rank] for rank, code in codes.items() if code is None}
        if not alive:
            if outcome.status == "completed" and (cause := control.get("stop")) is not None:
                return Outcome("stopped", cause, EXIT_STOPPED)
            return outcome
        for rank, process in alive.items():
            if not _is_stopped(process.pid):
                stopped_since.pop(rank, None)
            elif time.monotonic() - stopped_since.setdefault(rank, time.monotonic()) > STOPPED_LIMIT_S:
                fail(f"{_name(rank, spec)} stopped responding (process {process.pid} is suspended)")
        if signals.count and outcome.status == "completed":
            outcome.status, outcome.cause, outcome.exit_code = "stopped", f"signal {signals.name}", 128 + signals.number
            control.set("stop", "1")
            deadline = time.monotonic() + spec.stop_grace_s
        if time.monotonic() > deadline or signals.count > 1:
            killed = True
            _kill(ranks)
        spec.on_tick(states)
        connection.wait([process.sentinel for process in alive.values()], timeout=0.2)


def _death(rank: int, spec: Launch, code: int) -> str:
    if code < 0:
        hint = "; likely out of memory" if -code == signal.SIGKILL else ""
        return f"{_name(rank, spec)} was killed by signal {-code} ({signal.Signals(-code).name}{hint})"
    return f"{_name(rank, spec)} exited with code {code}; see logs/rank-{rank:03d}.log"


def _name(rank: int, spec: Launch) -> str:
    return f"rank {rank} ({World(rank, spec.trainers, spec.rollouts).role})"


def _is_stopped(pid: int | None) -> bool:
    """Whether a process is in state T (stopped by a signal)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] in "Tt"


def _kill(ranks: dict[int, BaseProcess]) -> None:
    for process in ranks.values():
        if process.exitcode is None:
            process.kill()
    for process in ranks.values():
        process.join(timeout=5.0)


class _Signals:
    """Counts SIGINT and SIGTERM while active; the handlers do nothing else."""

    def __init__(self) -> None:
        self.count, self.number = 0, 0

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name

    def __enter__(self) -> _Signals:
        self._old = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count, self.number = self.count + 1, number
