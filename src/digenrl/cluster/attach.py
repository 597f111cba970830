"""Ranks that somebody else started: torchrun, SLURM.

Process 0 hosts the run's store and leaves last; the death of any rank that was started ends the job (torchrun stops all
workers), that of a rollout that joined (`digenrl.cluster.join`) does not. `allocation` must add up to the number of
processes, the hardware profile says which of them train, and the run directory must be on a file system that all
machines share: in it, process 0 leaves the store's address and the run's token in a file that its user alone can read.
The others learn the directory's path from a store that anybody may write (torchrun's own; under SLURM process 0's), so
they take no file of another user and none of another job.
"""

from __future__ import annotations

import faulthandler
import ipaddress
import json
import math
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any

import torch.distributed as dist

from digenrl.cluster.access import ACCESS, Access, leave_access, take_access
from digenrl.cluster.control import Control
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.launcher import EXIT_STOPPED, Outcome
from digenrl.cluster.limits import Limits
from digenrl.cluster.members import CREDENTIALS, Members, Terms
from digenrl.cluster.network import Network, source_address
from digenrl.cluster.signals import StopSignals, obeyed
from digenrl.cluster.store import StoreClient, StoreLost, StoreServer
from digenrl.cluster.vitals import HeartbeatMonitor, LauncherMonitor, heartbeat_key, start_heartbeat
from digenrl.cluster.world import Session, World

LEAVE_MORE_S = 2.0
"""How much longer than `Limits.leave_s`, in which links close, process 0 waits for the others to leave; after a failure
`Limits.abort_s`. An agent that saw a rank fail kills the others 30 s later, and the report must be written by then."""
_TICK_S = 0.2
SLURM_KILL_WAIT_S, SLURM_ANNOUNCED_S = 30.0, 600.0
"""KillWait as SLURM has it by default; how long before a job's end its signal announces that end."""
SOMEWHERE = "192.0.2.1"
"""An address of no machine (RFC 5737): the route to it begins at this machine's outward address."""


@dataclass(frozen=True)
class Place:
    """A process among those that were started."""

    rank: int
    size: int
    local_rank: int
    address: str
    """Host of the store."""
    port: int
    prefix: str
    hosts_store: bool
    """This process must host the store at `address` (no agent does)."""
    local_size: int = 1
    """Processes on this machine."""

    @property
    def host(self) -> str:
        """The address under which peers reach this process: that of the route to the store. Where a machine resolves
        its own name to the loopback interface (Debian's 127.0.1.1), other machines need its outward address."""
        host = source_address(self.address)
        if ipaddress.ip_address(host).is_loopback and self.size > self.local_size:
            return source_address(SOMEWHERE)
        return host


def find_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Where this process stands, or None when nobody but the user started it.

    Raises:
        ValueError: SLURM tasks without MASTER_PORT.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        return Place(
            rank=int(environment["RANK"]),
            size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment["LOCAL_RANK"]),
            address=environment["MASTER_ADDR"],
            port=int(environment["MASTER_PORT"]),
            prefix=f"digenrl-{environment['TORCHELASTIC_RUN_ID']}-{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}",
            hosts_store=environment.get("TORCHELASTIC_USE_AGENT_STORE", "True") != "True"
            and environment["RANK"] == "0",
            local_size=int(environment["LOCAL_WORLD_SIZE"]),
        )
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:  # srun sets it; the batch script itself has SLURM_NTASKS
        if "MASTER_PORT" not in environment:
            raise ValueError(
                "SLURM tasks need MASTER_PORT: export one free port of the first node, see scripts/slurm.sbatch."
            )
        rank = int(environment["SLURM_PROCID"])
        return Place(
            rank=rank,
            size=int(environment["SLURM_STEP_NUM_TASKS"]),
            local_rank=int(environment["SLURM_LOCALID"]),
            address=environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"]),
            port=int(environment["MASTER_PORT"]),
            prefix="-".join(
                ["digenrl", *(environment.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))]
            ),
            hosts_store=rank == 0,
            local_size=_tasks_here(environment),
        )
    return None


def first_host(nodelist: str) -> str:
    """The first name of a SLURM node list: `gpu[03-05,9]-ib,cpu1` -> `gpu03-ib`.

    Raises:
        ValueError: it names none.
    """
    found = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,]*))?", nodelist)
    if found is None:
        raise ValueError(f"SLURM_STEP_NODELIST = {nodelist!r} names no host; set MASTER_ADDR.")
    return found[1] + (found[2] or "") + (found[3] or "")


def _tasks_here(environment: Mapping[str, str]) -> int:
    """Tasks of this node, from `SLURM_STEP_TASKS_PER_NODE` such as `8(x2),4`: that of node number SLURM_NODEID."""
    counts: list[int] = []
    for part in environment["SLURM_STEP_TASKS_PER_NODE"].split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts[int(environment["SLURM_NODEID"])]


def scheduler_limit(now: float, environment: Mapping[str, str] = os.environ) -> float:
    """Seconds between a signal that comes at Unix second `now` and SIGKILL, as the scheduler has it; infinity where
    nobody says so. SLURM's own: what is left of the job in its last ten minutes (`--signal`), otherwise its KillWait
    (`scancel`)."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return float(environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
    if "SLURM_JOB_ID" in environment:
        left = float(environment.get("SLURM_JOB_END_TIME", "0")) - now
        return left if SLURM_KILL_WAIT_S < left < SLURM_ANNOUNCED_S else SLURM_KILL_WAIT_S
    return math.inf


@contextmanager
def _stop_on_signals(signals: StopSignals, control: Control, grace: Callable[[], float]) -> Iterator[None]:
    """Inside, a stop signal asks for a clean stop after the step in progress (SLURM's --signal, torchrun's end); the
    second one, or the end of the grace, gives that step up. One that came before counts too. Afterwards they are
    ignored: an agent that sees one rank leave sends SIGTERM to the others, of which process 0 may still write the
    report.

    A thread does so: the main thread may hold the lock of its own store client.
    """
    signals.count_all()

    def watch() -> None:
        if number := signals.requests.get():
            control.set("signal", str(number))
            control.request_stop(f"signal {signal.Signals(number).name}")
            with suppress(Empty):
                number = signals.requests.get(timeout=0.0 if control.get("first_step") is None else grace())
            if number:
                control.set("give_up", "1")

    threading.Thread(target=watch, name="stop-on-signals", daemon=True).start()
    try:
        yield
    finally:
        for number in obeyed():
            signal.signal(number, signal.SIG_IGN)
        signals.requests.put(0)


def check_allocation(place: Place, trainers: int, rollouts: int) -> None:
    """Every started process must be a rank.

    Raises:
        ValueError: the allocation does not add up to the processes that were started.
    """
    if trainers < 1 or trainers + rollouts != place.size:
        raise ValueError(
            f"allocation.trainers = {trainers} and allocation.rollouts = {rollouts} are {trainers + rollouts} ranks, "
            f"but {place.size} processes were started: start as many (torchrun --nnodes x --nproc-per-node, srun "
            "--ntasks), or change one of the two keys; auto takes what is left."
        )


def attach(
    place: Place,
    ranks: Sequence[int],
    trainers: int,
    prepare: Callable[[], Path],
    rank_main: Callable[[World, Session], None],
    handshake: Handshake,
    limits: Limits,
    network: Network,
    on_hang: Callable[[Path, str], None],
    stop_grace: Callable[[Path], float],
    signals: StopSignals,
    credentials: Mapping[str, Any],
    max_lost: int | None = None,
) -> tuple[Path, Outcome]:
    """Run this process's rank to its end; returns the run directory and how it ended.

    Args:
        ranks: rank of every started process; the first `trainers` ranks train.
        prepare: makes the run directory; called by process 0 alone, the others learn its path from the store.
        handshake: the limits of this process, and the token where it is process 0.
        limits: how long ranks are waited for.
        network: where this machine's ranks listen.
        on_hang: called with the run directory and the cause where process 0 hangs and can report nothing itself.
        max_lost: of the rollouts that join; those that were started must live.
        rank_main, stop_grace, signals, credentials: as in `launcher.Launch`; the grace is told the run directory.
    """
    host = network.address(place.host)
    network.announce(host)
    notices = _notices(place, handshake.connect_s)
    names = {rank: f"rank {rank} ({'trainer' if rank < trainers else 'rollout'})" for rank in ranks}
    monitored = partial(LauncherMonitor, suspended_s=limits.suspended_s, name=names[ranks[place.rank]])
    with ExitStack() as ended:
        server: StoreServer | None = None
        if place.rank == 0:
            run_dir = prepare().absolute()
            monitor = monitored(partial(on_hang, run_dir))  # forked before the store has threads
            ended.callback(monitor.stop)
            server = StoreServer(network.listen(host), handshake)
            leave_access(run_dir, Access(server.host, server.port, handshake.token, time.time(), place.prefix))
            notices.set("run_dir", str(run_dir))
        run_dir = _learn_run_dir(notices, place, limits.start_s)
        session = replace(_session(run_dir, place, handshake), host=host, network=network, limits=limits)
        world = World(ranks[place.rank], trainers, place.size - trainers, place.local_rank)

        def hangs(cause: str) -> None:
            monitor.stop()
            on_hang(run_dir, cause)

        members: Members | None = None
        if server is not None:
            own, terms = Control(StoreClient(*session.store), 0), Terms(trainers, place.size - trainers, max_lost)
            members = Members(own, server, terms, run_dir, limits, names)
            own.set(CREDENTIALS, json.dumps(credentials))
            _judge(own, members, names, limits, hangs)
        else:
            ended.callback(monitored(partial(_say_death, session, world.rank)).stop)
        start_heartbeat(session, world)
        control, watcher = (Control(StoreClient(*session.store), place.rank, limits.start_s) for _ in range(2))
        outcome = Outcome()
        try:
            with _stop_on_signals(signals, watcher, partial(stop_grace, run_dir)):
                rank_main(world, session)
            if (cause := control.get("stop")) is not None:
                number = control.get("signal")
                outcome = Outcome("stopped", cause, EXIT_STOPPED if number is None else 128 + int(number))
        except Exception as error:
            cause = f"rank {world.rank} ({world.role}) raised {type(error).__name__}: {error}"
            with suppress(StoreLost):
                cause = control.get("abort") or cause
                control.abort(cause)
            outcome = Outcome("failed", cause, 1)
        with suppress(StoreLost):  # process 0 is gone
            control.set(f"left/{place.rank}", "1")
        if place.rank == 0:  # last out: the others still talk to the store, and their spans belong into the report
            patience = limits.abort_s if outcome.status == "failed" else limits.leave_s + LEAVE_MORE_S
            _wait_until_left(control, place.size, patience)
        if members is not None:
            members.see_off(limits.abort_s if outcome.status == "failed" else limits.leave_s)
        if server is not None:
            (run_dir / ACCESS).unlink(missing_ok=True)
            server.close()
    return run_dir, outcome


def _judge(
    control: Control, members: Members, names: Mapping[int, str], limits: Limits, on_own: Callable[[str], None]
) -> None:
    """Where no launcher watches, process 0 judges the heartbeats of all ranks and looks after those that joined, in a
    thread of its own. What befalls a started rank aborts the run: ranks that wait for others leave with the cause, and
    the scheduler ends those that hang.

    Args:
        names: started rank -> how messages call it. The process's own rank comes first.
        on_own: called with the cause if it is this process that hangs; then it ends.
    """
    own = next(iter(names))
    for rank in names:
        control.set(heartbeat_key(rank), "0")

    def run() -> None:
        monitor = HeartbeatMonitor(control, dict.fromkeys(names), limits)
        with suppress(StoreLost):  # the store is gone; whoever waits for it says so
            while control.get("abort") is None and control.get("done") is None:
                for rank, cause in monitor.unresponsive([*names, *members.guests]).items():
                    refusal = f"{names[rank]} {cause}" if rank in names else members.gone(rank, cause)
                    if refusal is not None:
                        control.abort(refusal)
                    if rank == own:
                        faulthandler.dump_traceback(2)
                        on_own(f"{names[rank]} {cause}")
                        os._exit(1)
                if (refusal := members.watch()) is not None:
                    control.abort(refusal)
                if not control.stopping and (number := members.grant_leaves()):
                    control.set("signal", str(number))
                    control.request_stop(f"signal {signal.Signals(number).name}")
                time.sleep(_TICK_S)

    threading.Thread(target=run, name="judge", daemon=True).start()


def _say_death(session: Session, rank: int, cause: str) -> None:
    """For a rank that cannot say so itself; the others leave with the cause."""
    with suppress(StoreLost):
        Control(StoreClient(*session.store), rank).abort(cause)


def _notices(place: Place, seconds: float) -> dist.Store:
    """The store on which process 0 says where the run directory is: an agent's, or process 0's."""
    host, limit = place.host if place.hosts_store else place.address, timedelta(seconds=seconds)
    try:
        store = dist.TCPStore(host, place.port, is_master=place.hosts_store, wait_for_workers=False, timeout=limit)
    except dist.DistError as error:
        raise OSError(f"no store at {host}:{place.port} for process {place.rank}: {error}") from error
    return dist.PrefixStore(place.prefix, store)


def _learn_run_dir(notices: dist.Store, place: Place, patience: float) -> Path:
    """Where process 0 says that the run directory is.

    Raises:
        ValueError: it says nothing, or this machine does not see the directory.
    """
    try:
        notices.wait(["run_dir"], timedelta(seconds=patience))
        run_dir = Path(notices.get("run_dir").decode())
    except dist.DistError as error:
        raise ValueError(
            f"process {place.rank} on {socket.gethostname()} waited for process 0 to make the run directory; see the "
            f"output of process 0 ({error})."
        ) from error
    if not run_dir.is_dir():
        raise ValueError(
            f"process {place.rank} on {socket.gethostname()} does not see the run directory {run_dir}, which process 0 "
            "made: set output_root to a directory that all machines share."
        )
    return run_dir


def _session(run_dir: Path, place: Place, handshake: Handshake) -> Session:
    """The session that process 0 wrote down.

    Raises:
        ValueError: as `take_access`; or the directory is another job's: whoever wrote its path on the store is not
            process 0.
    """
    access = take_access(run_dir)
    if access.prefix != place.prefix:
        raise ValueError(f"{run_dir} is in use by the job {access.prefix}, this process belongs to {place.prefix}.")
    return Session(
        store_host=access.host,
        store_port=access.port,
        handshake=replace(handshake, token=access.token),
        run_dir=run_dir,
        epoch=access.epoch,
        watched=False,
    )


def _wait_until_left(control: Control, size: int, seconds: float) -> None:
    """Bounded: a process that died never says that it has left, and the run's scheduler ends the others."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(control.get(f"left/{rank}") is None for rank in range(size)):
        time.sleep(0.05)
