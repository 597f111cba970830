"""The launcher: hosts the control store, forks the ranks, watches them, and cleans up whatever
happens.

The launcher is never a rank, so no rank's death takes the store with it. Ranks are forked after the
heavy imports: each rank then costs 14 MB instead of 250 MB and several seconds. No rank outlives
the launcher (PR_SET_PDEATHSIG), and the launcher does not exit before every rank has exited.

A rollout may die, leave or join while the run goes on (`digenrl.cluster.members`): its tasks go
back to the other ranks. The death of a trainer, or of the second owner of one task, ends the run
with the cause. When no rollout is left, the trainers save and the run ends.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Protocol

from digenrl.cluster.access import open_door
from digenrl.cluster.control import Aborted, Control
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.limits import Limits
from digenrl.cluster.members import CREDENTIALS, Members, Terms
from digenrl.cluster.network import Network
from digenrl.cluster.signals import StopSignals, end_with_parent, signals_blocked
from digenrl.cluster.store import StoreClient, StoreLost, StoreServer
from digenrl.cluster.vitals import (
    HeartbeatMonitor,
    LauncherMonitor,
    oom_kills,
    start_heartbeat,
)
from digenrl.cluster.world import Session, World
from digenrl.record import run_lock
from digenrl.record.redact import redact_text
from digenrl.record.run_dir import LOGS, open_log, own_folder, unix_time

RankMain = Callable[[World, Session], None]
"""Body of a rank. An exception in it ends the rank, with the exception's text as the cause."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Parameters of glibc's mallopt(3)."""
FILES_OF_A_PROCESS, FILES_PER_RANK = 64 + 128, 12
"""Open files of one process (libraries, logs, scorers; the buckets of a version that ranks of a
machine share), and connections per rank (to the store and to another rank)."""
MACHINE_LOST = -256
"""Exit code of a rank whose machine is gone, or out of reach. No signal has this number."""
EXIT_STOPPED = 75
"""Exit code of a run that asked to stop itself (EX_TEMPFAIL: fix the cause, then resume)."""


class PlacementError(RuntimeError):
    """Ranks cannot start where they should. The message has the reason and the remedy."""


class RankProcess(Protocol):
    """A rank as the launcher watches it: a process of its own, or one on another machine."""

    @property
    def pid(self) -> int | None:
        """Process id; None on another machine."""

    @property
    def exitcode(self) -> int | None:
        """Exit code; None while the rank lives, negative for the signal that killed it, or
        `MACHINE_LOST`."""

    @property
    def sentinel(self) -> int:
        """Handle for `multiprocessing.connection.wait`, ready once the rank has ended."""

    def kill(self) -> None:
        """End the rank at once."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until the rank has ended, at most `timeout` seconds."""


@dataclass
class RunOutcome:
    """Result of a run. Not frozen: the launcher fills in the fields while it watches."""

    status: str = "completed"
    """completed | stopped | failed"""
    cause: str | None = None
    exit_code: int = 0
    died: bool = False
    """Whether the run failed because ranks died, or raised, before anybody asked for a stop.
    Another attempt may succeed."""


Start = Callable[[RankMain, World, Session], RankProcess]
"""Starts one rank."""


class Launcher(Protocol):
    """A way to start the ranks of a run: on this machine, or through a cluster such as Ray."""

    @property
    def host(self) -> str:
        """Address on which the control store listens, unless `network.interface` names one."""

    @property
    def ranks_here(self) -> int:
        """Number of ranks that listen on this machine."""

    @property
    def places(self) -> Callable[[], AbstractContextManager[Start]] | None:
        """Context that reserves machines for the ranks and gives the function that starts a rank
        there; None: ranks are forked."""

    def check_devices(self) -> None:
        """Refuse a run whose ranks cannot have their devices, or cannot reach this process.

        Raises:
            ValueError: the message names the key to change.
        """

    def rank_main(self, fit: RankMain) -> RankMain:
        """Return the body of a rank: `fit`, on the device that the rank was given."""


@dataclass(frozen=True)
class Launch(Terms):
    """Everything that `launch_ranks` needs to start and to watch a run."""

    rank_main: RankMain
    run_dir: Path
    _: KW_ONLY
    stop_grace: Callable[[], float] = field(default=lambda: 30.0)
    """Returns, at a stop, the seconds for the step in progress. Then the trainers give it up and
    save the last version."""
    stop_save_s: float = 60.0
    """Seconds for that save, before ranks are killed."""
    signals: StopSignals = field(default_factory=StopSignals)
    """Stop signals of this process. Signals that came before the launch count too."""
    network: Network = field(default_factory=Network)
    """Interface and ports on which the store and the ranks listen."""
    host: str = "127.0.0.1"
    """Address for the store when `network` names no interface."""
    places: Callable[[], AbstractContextManager[Start]] | None = None
    """See `Launcher.places`."""
    handshake: Handshake = field(default_factory=Handshake)
    """The run's token, new for each run, and the limits for connections."""
    credentials: Mapping[str, object] = field(default_factory=dict)
    """Facts that a rollout that joins must share (`launchers.agreement`); {}: none can join."""
    limits: Limits = field(default_factory=Limits)
    """How long ranks are waited for."""
    on_tick: Callable[[Callable[[], dict[int, str]]], None] = field(default=lambda states: None)
    """Called several times per second with a function that returns each rank's present activity
    (the display)."""
    on_end: Callable[[], None] = field(default=lambda: None)
    """Called once after every rank has exited, while the store still answers."""
    on_orphaned: Callable[[str], None] = field(default=lambda cause: None)
    """Called with the cause, in a process of its own, when the launcher itself was killed or
    suspended."""


def check_open_files(ranks: int) -> None:
    """Raise this process's limit of open files as far as `ranks` ranks need.

    Raises:
        ValueError: the ranks need more open files than this machine allows.
    """
    needed = FILES_OF_A_PROCESS + FILES_PER_RANK * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(
            f"{ranks} ranks need {needed} open files in a process, and this machine allows {hard}: "
            "raise the limit "
            f"(ulimit -n {needed}, LimitNOFILE= of systemd), or set a smaller allocation."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def launch_ranks(spec: Launch) -> RunOutcome:
    """Start every rank, watch the ranks to the end, and return how the run ended. No process of the
    run is left behind.

    Raises:
        OSError: the control store could not be hosted.
    """
    # A forked rank inherits this process's garbage, but not its threads. Collecting, say, an
    # earlier run's store there would end threads that do not exist in the rank, and kill it. So
    # collect now, and let a child collect nothing that it was born with.
    gc.collect()
    host = spec.network.interface_address(lambda: spec.host)
    listener = spec.network.open_listener(host)
    monitor, port = (
        LauncherMonitor(spec.on_orphaned, spec.limits.suspended_s),
        listener.getsockname()[1],
    )
    epoch = unix_time()
    logs = own_folder(spec.run_dir / LOGS)
    ranks: dict[int, RankProcess] = {}
    with spec.signals, ExitStack() as ended:
        try:
            start: Start = partial(fork_rank, forget=partial(_close_inherited, monitor, listener))
            if spec.places is not None:
                start = ended.enter_context(spec.places())
                ended.enter_context(
                    spec.signals
                )  # a launcher's library (Ray) may have taken SIGTERM
            for rank in range(spec.trainers + spec.rollouts):
                world = World(rank, spec.trainers, spec.rollouts, local_rank=rank)
                session = Session(
                    host, port, spec.handshake, spec.run_dir, epoch, host, spec.network, spec.limits
                )
                ranks[rank] = start(spec.rank_main, world, session)
            # The store starts after the forks: a fork copies locks but not threads, so a lock that
            # a store thread holds at that moment would stay locked in the rank for ever. Ranks that
            # connect earlier wait in the backlog.
            server = StoreServer(listener, spec.handshake)
            ended.callback(server.close)
            # -1: the launcher is no rank.
            control = Control(StoreClient(host, port, spec.handshake), rank=-1)
            control.set(CREDENTIALS, json.dumps(spec.credentials))
            door = open_door(spec.run_dir, host, port, spec.handshake.token, epoch)
            ended.callback(door.unlink, missing_ok=True)
            members = Members(control, server, spec, spec.run_dir, spec.limits, ranks)
            outcome = _Watch(spec, ranks, control, members).watch_ranks()
        except PlacementError as error:
            outcome = RunOutcome("failed", str(error), 1)
        except Exception as error:
            outcome = _own_failure(error, logs)
        finally:
            # On every path: also when the watch itself has failed.
            _kill_ranks(ranks, spec.limits)
        try:
            # The store still answers here: the stack closes it at the end of this block.
            spec.on_end()
        except Exception as error:
            outcome = outcome if outcome.status == "failed" else _own_failure(error, logs)
        # Last, because until here the monitor reports a launcher that is killed.
        monitor.stop()
        return outcome


def _own_failure(error: Exception, logs: Path) -> RunOutcome:
    """Log an exception of the launcher, or of its display, and return it as the run's outcome."""
    with suppress(OSError), os.fdopen(open_log(logs / "launcher.log"), "a") as file:
        traceback.print_exception(error, file=file)
    return RunOutcome(
        "failed", f"the launcher raised {type(error).__name__}: {error}; see logs/launcher.log", 1
    )


def _close_inherited(monitor: LauncherMonitor, listener: socket.socket) -> None:
    monitor.close_in_rank()
    listener.close()


def fork_rank(
    rank_main: RankMain, world: World, session: Session, forget: Callable[[], None]
) -> RankProcess:
    """Start a rank as a child of this process. In the child, `forget` closes what the rank must not
    inherit."""
    process = multiprocessing.get_context("fork").Process(
        # os.getpid() is evaluated here, in the parent.
        target=_run_forked_rank,
        args=(rank_main, world, session, os.getpid(), forget),
    )
    with signals_blocked():
        process.start()
    return process


def _run_forked_rank(
    rank_main: RankMain,
    world: World,
    session: Session,
    launcher: int,
    forget: Callable[[], None],
) -> None:
    """Run a forked rank that dies with the launcher."""
    # Never collect what was born in the launcher: its threads do not exist here.
    gc.freeze()
    end_with_parent(signal.SIGKILL)
    # The kernel sends no signal for a parent that died between fork and prctl, so look once.
    if os.getppid() != launcher:
        os._exit(1)
    forget()
    run_lock.close_inherited()
    os._exit(
        run_rank(rank_main, world, session)
    )  # interpreter shutdown would wait for threads that wait for peers


def run_rank(rank_main: RankMain, world: World, session: Session) -> int:
    """Run a rank in this process and return its exit code. Output goes to the rank's log, an error
    to the launcher."""
    log = session.run_dir / LOGS / f"rank-{world.rank:03d}.log"
    keep_memory()
    session.network.announce_interface(session.host)
    # What is buffered belongs to the terminal, and not to the rank's log.
    sys.stdout.flush()
    sys.stderr.flush()
    file = open_log(log)
    # Descriptors, not sys.stdout: C libraries (CUDA, NCCL) print past Python.
    os.dup2(file, 1)
    os.dup2(file, 2)
    mask_secrets()
    code = 0
    try:
        # Before the body, which may load and compile for minutes.
        start_heartbeat(session, world)
        rank_main(world, session)
        control = Control(StoreClient(*session.store), world.rank)
        control.set(f"left/{world.rank}", "1")
    except Aborted as error:
        print(error, file=sys.stderr)
        code = 1
    except BaseException as error:
        traceback.print_exc()
        with suppress(StoreLost):  # the launcher is gone, and sees no cause
            Control(StoreClient(*session.store), world.rank).report_error(world.is_trainer, error)
        code = 1
    session.over.set()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def mask_secrets() -> None:
    """Mask secrets in everything that this rank prints from now on, and ignore a full disk.

    The output is a file of the run directory, which others may read and a full disk cuts short. The
    streams stay the same objects, because logging handlers hold references to them.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.write = partial(_print_redacted, stream.write)  # type: ignore[method-assign]
        stream.flush = partial(_or_nothing, stream.flush)  # type: ignore[method-assign]


def _print_redacted(write: Callable[[str], int], text: str) -> int:
    _or_nothing(partial(write, redact_text(text)))
    # The length, as `write` promises, also when a full disk took nothing.
    return len(text)


def _or_nothing(call: Callable[[], object]) -> None:
    with suppress(OSError):
        call()


def keep_memory() -> None:
    """Make glibc keep freed memory. Other C libraries decide for themselves.

    Weights and trajectories of many MB come and go in every step. Mapping their pages again takes
    as long as sending them (benchmarks/publish.py).
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest that every glibc takes
        library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        library.mallopt(
            _M_ARENA_MAX, 1
        )  # a thread's own arena would give its pages back all the same


class _Watch:
    """Waits for the ranks, and turns deaths, hangs and signals into one outcome with one cause."""

    def __init__(
        self, spec: Launch, ranks: dict[int, RankProcess], control: Control, members: Members
    ) -> None:
        self._spec, self._ranks, self._control, self._members = spec, ranks, control, members
        self._signals = spec.signals
        self._outcome = RunOutcome()
        self._deadline = float("inf")
        """Second of the monotonic clock at which the ranks are killed."""
        self._give_up_at = float("inf")
        """Second of the monotonic clock at which the step in progress is given up."""
        self._killed = False
        self._dead: set[int] = set()
        self._left: set[int] = set()
        """Ranks that have said that they leave. Only for them is exit code 0 no death."""
        self._oom_kills = oom_kills()
        self._suspects: dict[int, str] = {}
        """rank -> why the launcher killed it."""
        pids = {rank: process.pid for rank, process in ranks.items()}
        self._heartbeats = HeartbeatMonitor(control, pids, spec.limits)

    def watch_ranks(self) -> RunOutcome:
        """Watch until every rank process has exited, and return how the run ended."""
        while True:
            codes = {rank: process.exitcode for rank, process in self._ranks.items()}
            ended = {
                rank: code
                for rank, code in codes.items()
                if code is not None and rank not in self._dead
            }
            left = {
                rank
                for rank in ended.keys() - self._left
                if self._control.get(f"left/{rank}") is not None
            }
            self._left |= left
            self._handle_deaths(
                {rank: code for rank, code in ended.items() if rank not in self._left}
            )
            # After "done" the rollouts exit in any order, and none is missed.
            if self._outcome.status != "failed" and self._control.get("done") is None:
                self._look_after_rollouts(left)
            alive = {rank: self._ranks[rank] for rank, code in codes.items() if code is None}
            if not alive:
                self._members.wait_for_exits(self._spec.limits.leave_s)
                return self._judge_end()
            # Trainers without any rollout only wait for one to join: their silence is no hang.
            watched = [] if self._members.waiting else [*alive, *self._members.joined_elsewhere]
            for rank, cause in self._heartbeats.find_unresponsive(watched).items():
                if rank in alive:
                    self._suspects[rank] = cause
                    alive[rank].kill()  # the next turn sees its exit
                else:
                    self._fail_run(self._members.remove_rollout(rank, cause))
            self._obey_signals()
            if self._outcome.status != "completed" and alive.keys().isdisjoint(
                range(self._spec.trainers)
            ):
                self._kill_at(
                    time.monotonic() + self._spec.limits.abort_s
                )  # nobody waits for the rollouts
            if time.monotonic() > self._give_up_at:
                self._control.set(
                    "give_up", "1"
                )  # trainers drop the step, save the version before it, and leave
                self._kill_at(time.monotonic() + self._spec.stop_save_s)
            if time.monotonic() > self._deadline and not self._killed:
                self._kill_remaining()
            self._spec.on_tick(self._rank_states)
            # Returns early when a rank exits, so a death is seen at once and not 0.2 s later.
            connection.wait([process.sentinel for process in alive.values()], timeout=0.2)

    def _judge_end(self) -> RunOutcome:
        """Return how the run ended, now that no rank is left."""
        if self._outcome.status == "completed" and self._control.get("done") is None:
            # Ranks that could not leave in time say that they leave, and no longer why.
            self._fail_run(self._control.get("abort"))
        if self._outcome.status == "completed" and (cause := self._control.get("stop")) is not None:
            return RunOutcome("stopped", cause, EXIT_STOPPED)
        return self._outcome

    def _rank_states(self) -> dict[int, str]:
        return {
            rank: "lost" if rank in self._dead else self._control.get(f"state/{rank}") or "starting"
            for rank in self._ranks
        }

    def _handle_deaths(self, dead: dict[int, int]) -> None:
        """Go on without the rollouts that just died, or end the run."""
        self._dead |= dead.keys()
        if not dead or self._killed or self._outcome.status == "failed":
            return
        # A rank killed by a signal could not speak: its peers' lost connections come second.
        for rank, code in sorted(dead.items(), key=lambda item: (item[1] > 0, item[0])):
            cause = self._suspects.get(rank) or self._describe_death(rank, code)
            if cause is None:
                # It stopped because of an abort, so the run's cause is that of the abort.
                return self._fail_run(
                    self._control.get("abort") or f"{self._rank_name(rank)} exited with code {code}"
                )
            if rank < self._spec.trainers:
                return self._fail_run(f"{self._rank_name(rank)} {cause}")
            lost = code == MACHINE_LOST
            self._fail_run(self._members.remove_rollout(rank, cause, machine_lost=lost))

    def _describe_death(self, rank: int, code: int) -> str | None:
        """Return how a dead rank ended ("was killed by ...", "raised ..."); None if it exited only
        because the run was over."""
        # On another machine these codes stand for every end without an exit code.
        if code < 0 and self._ranks[rank].pid is None:
            what = "machine" if code == MACHINE_LOST else "process"
            return f"is gone with its {what}; see logs/rank-{rank:03d}.log"
        if code < 0:
            hint = ""
            if -code == signal.SIGKILL:
                # The counter is that of a cgroup or a machine: a hint, and no proof.
                short = oom_kills() > self._oom_kills
                hint = (
                    "; the kernel ran out of memory"
                    if short
                    else "; sent from outside, not for lack of memory"
                )
            return f"was killed by signal {-code} ({signal.Signals(-code).name}{hint})"
        if (
            code > 0 and self._control.get("abort") is not None
        ):  # a later mistake may be a consequence of the first
            return None
        unsaid = f"exited with code {code} before the run ended; see logs/rank-{rank:03d}.log"
        return self._control.get(f"cause/{rank}") or unsaid

    def _look_after_rollouts(self, left: set[int]) -> None:
        """Handle rollouts that have just `left`, ask to leave or joined. End the run when too few
        remain."""
        for rank in left & self._members.leaving:
            self._fail_run(self._members.remove_rollout(rank, "left"))
        self._fail_run(self._members.check_joined_rollouts())
        if (
            self._outcome.status != "completed" or self._signals.count
        ):  # a stop: nobody leaves before the others
            return
        if number := self._members.grant_leaves():
            self._control.set("signal", str(number))
        if (cause := self._members.check_enough_rollouts()) is not None:
            self._outcome = RunOutcome("failed", cause, 1, died=not self._members.last_one_left)
            self._give_up(0.0)

    def _give_up(self, grace: float) -> None:
        """Stop after the step in progress if it ends within `grace` seconds, else give that step
        up."""
        self._control.set("stop", "1")
        if (
            self._control.get("first_step") is None
        ):  # nothing has been trained, so nothing can be lost
            return self._kill_remaining()
        self._give_up_at = time.monotonic() + grace

    def _fail_run(self, cause: str | None) -> None:
        """End the run because of `cause`, the first one. None changes nothing."""
        if cause is not None and self._outcome.status != "failed":
            # Before the status changes: a failure after a request to stop is not tried again.
            self._outcome.died = (
                self._outcome.status == "completed" and self._control.get("stop") is None
            )
            self._outcome.status, self._outcome.cause, self._outcome.exit_code = "failed", cause, 1
            self._control.abort_run(cause)
            self._kill_at(time.monotonic() + self._spec.limits.abort_s)

    def _obey_signals(self) -> None:
        """Act on stop signals. A rank may have passed the first one on; the others count only when
        sent to this process.

        The first signal ends the run after the step in progress, the second gives that step up, the
        third kills the ranks.
        """
        passed_on = self._control.get("signal")
        if (self._signals.count or passed_on) and self._outcome.status == "completed":
            number = signal.Signals(self._signals.number or int(passed_on or 0))
            self._outcome.status, self._outcome.exit_code = "stopped", 128 + number
            self._outcome.cause = f"signal {number.name}"
            self._give_up(self._spec.stop_grace())
        if self._outcome.status == "stopped" and self._signals.count > 1:
            self._give_up_at = 0.0
        if self._outcome.status == "stopped" and self._signals.count > 2:
            self._deadline = 0.0

    def _kill_at(self, deadline: float) -> None:
        self._deadline = min(self._deadline, deadline)

    def _kill_remaining(self) -> None:
        """Kill every rank that still runs."""
        training = any(self._ranks[rank].exitcode is None for rank in range(self._spec.trainers))
        if (
            self._outcome.status == "stopped"
            and training
            and self._control.get("first_step") is not None
        ):
            self._outcome.cause = (
                f"{self._outcome.cause}; the trainers had not saved when they were killed"
            )
        self._killed = True
        _kill_ranks(self._ranks, self._spec.limits)

    def _rank_name(self, rank: int) -> str:
        return f"rank {rank} ({World(rank, self._spec.trainers, self._spec.rollouts).role})"


def _kill_ranks(ranks: dict[int, RankProcess], limits: Limits) -> None:
    # Kill all of them before the first wait, so that the waits overlap.
    for process in ranks.values():
        if process.exitcode is None:
            process.kill()
    for process in ranks.values():
        process.join(timeout=limits.leave_s)
