"""Run inside processes that torchrun or SLURM started: one process is one rank.

Process 0 hosts the run's control store and leaves last. The death of any started rank ends the job
(torchrun stops all workers). The death of a rollout that joined later (`digenrl join`) does
not. `allocation` must add up to the number of processes. The hardware profile decides which of them
train.

The run directory must be on a file system that all machines share. Process 0 leaves the store's
address and the run's token there, in a file that only its own user can read. The other processes
learn the directory's path from a store that anybody may write: torchrun's own, or under SLURM the
one of process 0. They therefore refuse an access file of another user or of another job.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import Empty

import torch.distributed as dist

from digenrl import devices, run
from digenrl.cluster.access import ACCESS, Access, write_access
from digenrl.cluster.control import Aborted, Control
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.launcher import EXIT_STOPPED, RunOutcome
from digenrl.cluster.leaving import Leaving
from digenrl.cluster.limits import Limits
from digenrl.cluster.members import CREDENTIALS, Members, Terms
from digenrl.cluster.signals import StopSignals, handled_signals
from digenrl.cluster.store import StoreClient, StoreLost, StoreServer
from digenrl.cluster.vitals import HeartbeatMonitor, LauncherMonitor, start_heartbeat
from digenrl.cluster.world import Session, World
from digenrl.hardware import parse_hardware
from digenrl.launchers.agreement import compare_processes
from digenrl.launchers.announce import announce_launch
from digenrl.launchers.attempts import held_run_dir
from digenrl.launchers.ending import end_alone, stop_grace
from digenrl.launchers.job import Job
from digenrl.launchers.places import Place, check_allocation, process_ranks
from digenrl.launchers.reaching import read_access
from digenrl.record.redact import redact_text
from digenrl.record.run_dir import unix_time

LEAVE_MORE_S = 2.0
"""Seconds that process 0 waits beyond `Limits.leave_s` for the other ranks to leave. Their links
close within `Limits.leave_s`. After a failure they have `Limits.abort_s` more, and those that
cannot leave are then ended by their own heartbeats (`cluster.leaving`). A torchrun agent that saw a
rank fail kills the others 30 s later, and the report must be written by then."""
SHARED_S = 60.0
"""Seconds until a directory that process 0 made is visible on every machine. NFS clients keep a
listing for 30 to 60 s (acdirmax)."""
_TICK_S = 0.2


@contextmanager
def _stop_on_signals(
    signals: StopSignals, control: Control, grace: Callable[[], float]
) -> Iterator[None]:
    """Turn stop signals into a clean stop of the run while the context is open.

    The first signal (SLURM's --signal, torchrun's end) ends the run after the step in progress. A
    second signal, or the end of the grace, gives that step up. A signal that came before the
    context was opened counts too. Afterwards signals are ignored: an agent that sees one rank leave
    sends SIGTERM to the others, and process 0 may still be writing the report.

    A thread does the work, because the main thread may hold the lock of its own store client.
    """
    signals.count_all()

    def forward_signals() -> None:
        if number := signals.requests.get():
            control.set("signal", str(number))
            control.request_stop(f"signal {signal.Signals(number).name}")
            with suppress(Empty):
                number = signals.requests.get(
                    timeout=0.0 if control.get("first_step") is None else grace()
                )
            if number:
                control.set("give_up", "1")

    threading.Thread(target=forward_signals, name="stop-on-signals", daemon=True).start()
    try:
        yield
    finally:
        for number in handled_signals():
            signal.signal(number, signal.SIG_IGN)
        signals.requests.put(0)


def run_attached(place: Place, job: Job, signals: StopSignals) -> tuple[Path, RunOutcome]:
    """Run this process's rank to its end. Return the run directory and how the run ended.

    Raises:
        ValueError: the allocation does not fit the processes that were started, or they share no
            directory.
        OSError: no port, or no store.
    """
    settings, (trainers, rollouts) = job.composed.settings, job.ranks
    check_allocation(place, trainers, rollouts)
    ranks = process_ranks(parse_hardware(settings.hardware), trainers, rollouts)
    handshake, limits, network = Handshake(), Limits(**settings.limits.model_dump()), job.network
    host = network.interface_address(lambda: place.host)
    network.announce_interface(host)
    notices = _connect_notices(place, limits.start_s)
    names = {rank: f"rank {rank} ({'trainer' if rank < trainers else 'rollout'})" for rank in ranks}
    monitored = partial(
        LauncherMonitor, suspended_s=limits.suspended_s, name=names[ranks[place.rank]]
    )
    with ExitStack() as ended:
        server: StoreServer | None = None
        if place.rank == 0:
            run_dir = _prepare_run_dir(job, signals)
            monitor = monitored(
                partial(end_alone, run_dir, settings)
            )  # forked before the store has threads
            ended.callback(monitor.stop)
            server = StoreServer(network.open_listener(host), handshake)
            write_access(
                run_dir,
                Access(server.host, server.port, handshake.token, unix_time(), place.prefix),
            )
            notices.set("checkpoint", "" if job.checkpoint is None else job.checkpoint.name)
            notices.set("run_dir", str(run_dir))
        run_dir = _learn_run_dir(notices, place, limits.start_s)
        # One process has verified it: sixteen would read every file of it sixteen times.
        name = notices.get("checkpoint").decode()
        job = replace(job, checkpoint=run_dir / "checkpoints" / name if name else None)
        session = replace(
            _session_from_access(run_dir, place, handshake),
            host=host,
            network=network,
            limits=limits,
        )
        world = World(ranks[place.rank], trainers, rollouts, place.local_rank)

        def end_here(cause: str) -> None:
            # Called just before the process exits; its monitor would call that a death.
            monitor.stop()
            if server is not None:
                end_alone(run_dir, settings, cause)

        members: Members | None = None
        if server is not None:
            # A connection of its own: the watching thread must not wait for a call of the main
            # thread.
            own = Control(StoreClient(*session.store), 0)
            terms = Terms(trainers, rollouts, max_lost=job.max_lost)
            members = Members(own, server, terms, run_dir, limits, names)
            own.set(CREDENTIALS, json.dumps(job.credentials))
            _watch_ranks(own, members, names, limits, end_here)
        else:
            monitor = monitored(partial(_say_death, session, world.rank))
            ended.callback(monitor.stop)
        more_s = LEAVE_MORE_S if place.rank == 0 else 0.0
        start_heartbeat(session, world, Leaving(session, world, end_here, more_s))
        control, watcher = (
            Control(StoreClient(*session.store), world.rank, limits.start_s) for _ in range(2)
        )
        stops = _stop_on_signals(signals, watcher, partial(stop_grace, settings, run_dir))
        outcome = _run_rank(partial(_be_rank, job, place, world, session), world, control, stops)
        session.over.set()
        with suppress(StoreLost):  # process 0 is gone
            control.set(f"left/{world.rank}", "1")
        failed = outcome.status == "failed"
        if place.rank == 0:  # last out: the others use the store, and the report needs their spans
            patience = limits.leave_s + LEAVE_MORE_S + failed * limits.abort_s
            _wait_until_left(control, range(place.size), patience)
        if members is not None:
            members.wait_for_exits(limits.abort_s if failed else limits.leave_s)
        if server is not None:
            (run_dir / ACCESS).unlink(missing_ok=True)
            server.close()
    return run_dir, outcome


def _prepare_run_dir(job: Job, signals: StopSignals) -> Path:
    """Make the run directory; return its absolute path."""
    signals.count_all()  # what exists from here on is ended in order
    run_dir = held_run_dir(job)
    announce_launch(job, run_dir, job.checkpoint)
    return run_dir.absolute()


def _be_rank(job: Job, place: Place, world: World, session: Session) -> None:
    """Take this rank's GPU, agree with the other processes, and be the rank to the end of the
    run."""
    if not job.composed.settings.hardware.emulate:
        devices.take_gpu(world.local_rank)
        devices.claim_gpu(session, world.rank)
    compare_processes(job.composed.settings, place, world, session)
    run.fit_rank(job.composed.settings, job.checkpoint, job.advice, world, session)


def _run_rank(
    rank_main: Callable[[], None],
    world: World,
    control: Control,
    stops: AbstractContextManager[None],
) -> RunOutcome:
    """Run this process's rank inside `stops`. Return the outcome; an error ends the run for all."""
    try:
        with stops:
            rank_main()
        if (cause := control.get("stop")) is None:
            return RunOutcome()
        number = control.get("signal")
        exit_code = EXIT_STOPPED if number is None else 128 + int(number)
        return RunOutcome("stopped", cause, exit_code)
    except BaseException as error:
        cause = f"rank {world.rank} ({world.role}) raised {type(error).__name__}: {error}"
        # Nobody else shows it: under a scheduler a rank has no log but the terminal.
        told = str(error) if isinstance(error, Aborted) else traceback.format_exc()
        _print_redacted(told)
        with suppress(StoreLost):
            cause = control.get("abort") or cause
            control.abort_run(cause)
        return RunOutcome("failed", cause, 1)


def _watch_ranks(
    control: Control,
    members: Members,
    names: Mapping[int, str],
    limits: Limits,
    on_own: Callable[[str], None],
) -> None:
    """Watch the heartbeats of all ranks in a thread of process 0, because under a scheduler no
    launcher does so.

    The thread also handles the rollouts that join. A started rank that hangs or falls silent aborts
    the run. Ranks that wait for others then leave with the cause. A rank that hangs is ended by its
    own heartbeat. The thread says the cause at once, and names the ranks that have not left in
    time.

    Args:
        names: started rank -> its name in messages. The rank of this process comes first.
        on_own: called with the cause when this process itself hangs, just before it exits.
    """
    own = next(iter(names))

    def watch_heartbeats() -> None:
        monitor = HeartbeatMonitor(control, dict.fromkeys(names), limits)
        with suppress(StoreLost):  # the store is gone; whoever waits for it says so
            while control.get("abort") is None and control.get("done") is None:
                for rank, cause in monitor.find_unresponsive(
                    [*names, *members.joined_elsewhere]
                ).items():
                    refusal = (
                        f"{names[rank]} {cause}"
                        if rank in names
                        else members.remove_rollout(rank, cause)
                    )
                    if refusal is not None:
                        control.abort_run(refusal)
                    if rank == own:
                        # The main thread hangs and cannot clean up, so this thread reports and ends
                        # the process.
                        faulthandler.dump_traceback(2)
                        on_own(f"{names[rank]} {cause}")
                        os._exit(1)
                if (refusal := members.check_joined_rollouts()) is not None:
                    control.abort_run(refusal)
                if not control.stopping and (number := members.grant_leaves()):
                    control.set("signal", str(number))
                    control.request_stop(f"signal {signal.Signals(number).name}")
                time.sleep(_TICK_S)
            if (abort := control.get("abort")) is not None:
                _print_redacted(f"the run is aborted: {abort}")
                seconds = limits.abort_s + limits.leave_s
                others = [rank for rank in names if rank != own]
                if staying := _wait_until_left(control, others, seconds):
                    late = ", ".join(names[rank] for rank in staying)
                    _print_redacted(f"{late}: not left {seconds:g} s after the run was aborted")

    threading.Thread(target=watch_heartbeats, name="watch-ranks", daemon=True).start()


def _print_redacted(text: str) -> None:
    print(redact_text(text), file=sys.stderr, flush=True)


def _say_death(session: Session, rank: int, cause: str) -> None:
    """Abort the run with `cause`, on behalf of a rank that cannot report its own death."""
    _print_redacted(cause)
    with suppress(StoreLost):
        control = Control(StoreClient(*session.store), rank)
        control.abort_run(cause)
        control.set(f"left/{rank}", "1")


def _connect_notices(place: Place, seconds: float) -> dist.Store:
    """Connect to the store on which process 0 announces the run directory: a torchrun agent's, or
    that of process 0."""
    host, limit = place.host if place.hosts_store else place.address, timedelta(seconds=seconds)
    try:
        store = dist.TCPStore(
            host, place.port, is_master=place.hosts_store, wait_for_workers=False, timeout=limit
        )
    except dist.DistError as error:
        raise OSError(
            f"no store at {host}:{place.port} for process {place.rank}: {error}"
        ) from error
    return dist.PrefixStore(place.prefix, store)


def _learn_run_dir(notices: dist.Store, place: Place, patience: float) -> Path:
    """Wait for process 0 to announce the run directory, and return its path.

    Raises:
        ValueError: process 0 announced nothing in time, or this machine does not see the directory.
    """
    try:
        notices.wait(["run_dir"], timedelta(seconds=patience))
        run_dir = Path(notices.get("run_dir").decode())
    except dist.DistError as error:
        raise ValueError(
            f"process {place.rank} on {socket.gethostname()} waited for process 0 to make the run "
            "directory; see the "
            f"output of process 0 ({error})."
        ) from error
    # A file server may serve the parent's old listing for up to a minute.
    deadline = time.monotonic() + SHARED_S
    while not run_dir.is_dir() and time.monotonic() < deadline:
        time.sleep(_TICK_S)
    if not run_dir.is_dir():
        raise ValueError(
            f"process {place.rank} on {socket.gethostname()} does not see the run directory "
            f"{run_dir}, which process 0 "
            "made: set output_root to a directory that all machines share."
        )
    return run_dir


def _session_from_access(run_dir: Path, place: Place, handshake: Handshake) -> Session:
    """Return the session that the access file of process 0 describes.

    Raises:
        ValueError: as `read_access`; or the directory belongs to another job, so process 0 did not
            announce it.
    """
    access = read_access(run_dir)
    if access.prefix != place.prefix:
        raise ValueError(
            f"{run_dir} is in use by the job {access.prefix}, this process belongs to "
            f"{place.prefix}."
        )
    return Session(
        store_host=access.host,
        store_port=access.port,
        handshake=replace(handshake, token=access.token),
        run_dir=run_dir,
        epoch=access.epoch,
        watched=False,
    )


def _wait_until_left(control: Control, ranks: Iterable[int], seconds: float) -> list[int]:
    """Wait until each of `ranks` has left, at most `seconds`. Return those that have not.

    A rank says itself that it leaves, or its monitor does. A machine that is gone says nothing.
    """
    deadline, keys = time.monotonic() + seconds, {rank: f"left/{rank}" for rank in ranks}
    while True:
        said = control.get_all(list(keys.values()))
        staying = [rank for rank, text in zip(keys, said, strict=True) if text is None]
        if not staying or time.monotonic() > deadline:
            return staying
        time.sleep(0.05)
