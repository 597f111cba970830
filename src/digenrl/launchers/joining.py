"""Add one more rollout to a running run, from a process on any machine that reaches the run's
store.

    this process --token--> store: what must I show? --the same configuration and code--> a new rank number
      `- the rank: builds its model, joins (`Control.add_joined_rank`), asks for weights, claims like any other

This process watches the rank as a launcher watches its own ranks, and raises a counter on the store
every second (`digenrl.cluster.members`). If the rank ends, or this process does, the run loses a
rollout and goes on.
"""  # noqa: E501

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from json import loads
from pathlib import Path

from digenrl import devices
from digenrl.cluster.access import Access
from digenrl.cluster.control import Control
from digenrl.cluster.handshake import Handshake, NotOfThisRun
from digenrl.cluster.launcher import RunOutcome, fork_rank
from digenrl.cluster.limits import Limits
from digenrl.cluster.members import CREDENTIALS, end_key
from digenrl.cluster.network import Network
from digenrl.cluster.signals import StopSignals
from digenrl.cluster.store import StoreClient, StoreLost
from digenrl.cluster.timers import BEAT_EVERY_S
from digenrl.cluster.vitals import HeartbeatMonitor, watch_key
from digenrl.cluster.world import Session, World
from digenrl.config.settings import Settings
from digenrl.launchers.agreement import (
    ProcessFacts,
    check_machine,
    describe_kinds,
    find_differences,
)
from digenrl.launchers.reaching import source_address
from digenrl.record.run_dir import LOGS, own_folder
from digenrl.settle import begins_with

_TICK_S = 0.2


@dataclass(frozen=True)
class JoinRequest:
    """A request to join a run: where the run is, and what this process brings."""

    access: Access
    settings: Settings
    """The run's, settled."""
    run_dir: Path
    """Directory in which this rank writes: the run's own, or a copy of it."""
    local_rank: int
    """Index of this rank's device on its machine."""

    @property
    def place(self) -> str:
        return f"{self.access.host}:{self.access.port}"

    def make_handshake(self, rank: int) -> Handshake:
        """Return the handshake by which this process proves its right to join."""
        return Handshake(token=self.access.token, rank=rank)

    def connect_control(self, rank: int = -1) -> Control:
        """Return the run's control store, as `rank` reaches it."""
        return Control(
            StoreClient(self.access.host, self.access.port, self.make_handshake(rank)), rank
        )


def check_agreement(request: JoinRequest, own: ProcessFacts) -> None:
    """Compare this process with the run that it asks to join.

    Raises:
        ValueError: both differ, or as `credentials_of`.
    """
    run = credentials_of(request)
    if differences := find_differences(run, own):
        raise ValueError(
            f"this rollout on {own.host} differs from the run at {request.place} on {run.host}: "
            f"{'; '.join(differences)}. Copy config.yaml anew from the run's directory, and change "
            "nothing; start the rollout from the same checkout and environment."
        )
    if warning := describe_kinds((facts.architecture, facts.host) for facts in (run, own)):
        print(warning, file=sys.stderr)
    gpus = devices.uses_gpus(request.settings)
    check_machine(1, gpus, alone=own.host == run.host)


def credentials_of(request: JoinRequest) -> ProcessFacts:
    """Return the facts that a rank must share with the run to join it.

    Raises:
        ValueError: no run answers, the token is that of another run, or the run is ending.
    """
    try:
        shown, cause, *ends = request.connect_control().get_all(
            [CREDENTIALS, "abort", "stop", "done"]
        )
    except NotOfThisRun as error:
        raise ValueError(
            f"the token is not that of the run at {request.place}: take "
            f"{request.run_dir}/access.json anew from the run's directory (each start of a run has "
            "a token of its own), or set DIGENRL_RUN_TOKEN to what is in it."
        ) from error
    except (OSError, StoreLost) as error:
        raise ValueError(
            f"no run answers at {request.place} ({error}): it has ended, or this machine does not "
            "reach it. A run on one machine listens on loopback unless it was started with "
            "network.interface=NAME."
        ) from error
    if cause is not None or any(end is not None for end in ends):
        raise ValueError(
            f"the run at {request.place} ends{f': {cause}' if cause else ''}; nobody can join it "
            "any more."
        )
    found = loads(shown or "{}")
    if not found:
        raise ValueError(
            f"the run at {request.place} takes nobody in: it is colocated, or has "
            "schedule.claims=split. Start it with rollouts and schedule.claims=shared."
        )
    return ProcessFacts(**found)


def join_run(
    request: JoinRequest, rank_main: Callable[[World, Session], None], signals: StopSignals
) -> RunOutcome:
    """Be a rollout of the run until the run ends or this process is asked to leave. Return how that
    ended.

    Raises:
        OSError, StoreLost: the run is gone.
    """
    # One atomic add, so that two processes that join at once get different numbers.
    rank = request.connect_control().add("ranks", 1) - 1
    control, access, settings = request.connect_control(rank), request.access, request.settings
    network, limits = (
        Network(settings.network.interface, settings.network.ports),
        Limits(**settings.limits.model_dump()),
    )
    world = World(rank, *begins_with(settings), request.local_rank)
    session = Session(
        access.host,
        access.port,
        request.make_handshake(rank),
        request.run_dir,
        access.epoch,
        network.interface_address(lambda: source_address(access.host)),
        network,
        limits,
    )
    own_folder(request.run_dir / LOGS)
    process = fork_rank(rank_main, world, session, lambda: None)
    # Whether it gets on in its stage is judged where all ranks are seen.
    monitor = HeartbeatMonitor(control, {rank: process.pid}, replace(limits, stage_factor=None))
    cause: str | None = None
    asked, beats = 0, 0
    beat_at = 0.0
    try:
        while process.exitcode is None:
            if time.monotonic() > beat_at:
                beats, beat_at = beats + 1, time.monotonic() + BEAT_EVERY_S
                control.set(watch_key(rank), str(beats))
            if signals.count > asked:
                asked = signals.count
                control.set(f"ask/{rank}", str(signals.number))
            cause = cause or monitor.find_unresponsive([rank]).get(rank)
            if cause is not None or asked > 1:
                process.kill()
            process.join(_TICK_S)
        said, left, done, abort = control.get_all(
            [f"cause/{rank}", f"left/{rank}", "done", "abort"]
        )
        if left is not None and (done or abort is None):
            return RunOutcome("completed" if done else "left")
        cause = cause or said or _describe_end(process.exitcode or 0)
        control.set(end_key(rank), cause)
        cause = f"the run ended: {abort}" if abort else cause
    except StoreLost:
        process.join(limits.abort_s)
        cause = "the run has ended, or goes on without this rank"
    finally:
        process.kill()
        process.join()
    return RunOutcome(
        "failed",
        f"rank {rank} (rollout): {cause}; see {request.run_dir}/logs/rank-{rank:03d}.log",
        1,
    )


def _describe_end(code: int) -> str:
    return (
        f"was killed by signal {-code} ({signal.Signals(-code).name})"
        if code < 0
        else f"exited with code {code}"
    )
