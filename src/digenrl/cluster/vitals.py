"""Signs of life: the launcher monitors its ranks, and a small process monitors the launcher.

    rank      -- what its threads do, on the control store, every second, from a thread of its own -->  launcher
    launcher  -- the end of a pipe, and its state in /proc -->  LauncherMonitor

A suspended rank (SIGSTOP stops all of its threads) is seen in /proc within seconds. A rank without
heartbeat counts as dead only if it uses no processor time either, because a library that computes
or compiles may hold Python's lock for long. A rank hangs when one of its threads shows no progress
for much longer than that stage has ever taken (`Limits`). A thread that waits for other ranks is
excused while any thread of the run is at work. When all of them wait for long, the run hangs.

Durations are sums of the observer's own intervals between observations. A launcher that was itself
suspended (Ctrl-Z, then fg) therefore finds nobody dead.
"""  # noqa: E501

from __future__ import annotations

import faulthandler
import gc
import json
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import psutil

from digenrl.cluster.control import Control
from digenrl.cluster.hangs import HangDetector
from digenrl.cluster.leaving import Leaving
from digenrl.cluster.limits import Limits
from digenrl.cluster.signals import LEAVES, STOPS, signals_blocked, wait_for_request
from digenrl.cluster.store import StoreClient, StoreLost
from digenrl.cluster.timers import BEAT_EVERY_S, ConditionTimer, suggest_raising
from digenrl.cluster.world import Session, World
from digenrl.record.progress import Progress, Stretch

STACKS = signal.SIGUSR2
"""Signal at which a rank writes the stacks of its threads to its log."""
_ANSWER_S = 0.1
"""Seconds between two looks of a rollout for the answer to its request to leave."""
_STACKS_S = 0.2
"""Seconds that writing the stacks takes."""
_CHECK_S = 0.5
"""Seconds between two checks of the launcher. No check counts for more than twice that, whatever
the clock says."""


def is_suspended(pid: int | None) -> bool:
    """Return whether a process was stopped by a signal."""
    with suppress(psutil.Error):
        stopped = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return pid is not None and psutil.Process(pid).status() in stopped
    return False


def cpu_seconds(pid: int | None) -> float:
    """Return the processor time that a process has used; 0 if the process is gone."""
    with suppress(psutil.Error):
        return 0.0 if pid is None else sum(psutil.Process(pid).cpu_times()[:2])
    return 0.0


def oom_kills() -> int:
    """Count the processes that the kernel killed for lack of memory, in this process's cgroup or
    else on this machine."""
    cgroups = dict(
        line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines()
    )
    # cgroup v2, cgroup v1, the whole machine.
    for path in (
        f"/sys/fs/cgroup{cgroups.get('', '')}/memory.events",
        f"/sys/fs/cgroup/memory{cgroups.get('memory', '')}/memory.oom_control",
        "/proc/vmstat",
    ):
        with suppress(OSError):
            counts = [
                line.split()[1]
                for line in Path(path).read_text().splitlines()
                if line.startswith("oom_kill ")
            ]
            if counts:
                return int(counts[0])
    return 0


def start_heartbeat(session: Session, world: World, leaving: Leaving | None = None) -> None:
    """Publish once per second what this process does, in a thread of its own, until this rank's
    part of the run is over.

    The thread also passes stop signals on. A signal of `LEAVES` (any signal, on a rank that joined)
    asks to let this rollout leave. Any other signal asks to stop the run.

    Args:
        leaving: how this rank leaves a run that is aborted, or whose store is gone, when its main
            thread does not; None: as `Leaving` alone does.
    """
    faulthandler.register(STACKS, file=2)
    rank, leaves = world.rank, () if world.is_trainer else STOPS if world.joined else LEAVES
    leaving = leaving or Leaving(session, world)

    def send_heartbeats() -> None:
        # done: the trainers have ended the run, so that a store that vanishes is no loss.
        count, pause, done = 0, BEAT_EVERY_S, False
        try:
            # A connection of its own: a call of the main thread may block its client for long.
            control = Control(StoreClient(*session.store), rank)
            while not session.over.is_set():
                abort, ended, leave = control.get_all(["abort", "done", f"leave/{rank}"])
                done = done or ended is not None
                leaving.leave_when_overdue(abort, control)
                count += 1
                doing = [astuple(stretch) for stretch in session.progress.current_stretches()]
                control.set(heartbeat_key(rank), json.dumps([count, doing]))
                control.set(f"state/{rank}", session.progress.said)
                if any((told := process_facts(session.progress)).values()):
                    control.set(facts_key(rank), json.dumps(told))
                if leaves and leave is not None:
                    session.leave.set()
                if not session.watched:  # no launcher: the process has its own handlers
                    time.sleep(BEAT_EVERY_S)
                elif (number := wait_for_request(pause)) is not None:
                    asks = number in leaves
                    control.set(f"ask/{rank}" if asks else "signal", str(int(number)))
                    pause = _ANSWER_S if asks else BEAT_EVERY_S
        except StoreLost as error:
            cause = f"rank {rank} lost the control store: its process or machine is gone ({error})"
            while not (done or session.over.is_set()):  # a run that is done closes its store
                leaving.leave_when_overdue(cause)
                time.sleep(BEAT_EVERY_S)

    threading.Thread(target=send_heartbeats, name=f"heartbeat-{rank}", daemon=True).start()


def watch_key(rank: int) -> str:
    """Return the store key of the counter that the watcher of a joined rank raises every second."""
    return f"watch/{rank}"


class ProcessFacts(TypedDict):
    """Facts that a rank's process tells with its heartbeats."""

    peak_gib: dict[str, float]
    """Stage -> GiB (`Progress.peaks`)."""
    graphs: int
    """Graphs that torch.compile has made."""


def process_facts(progress: Progress) -> ProcessFacts:
    """Return the facts of this process."""
    gib = {stage: round(held / 2**30, 4) for stage, held in sorted(dict(progress.peaks).items())}
    # Looked up, not imported: the import takes seconds, and most ranks do not compile.
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return {"peak_gib": gib, "graphs": dynamo.counters["stats"]["unique_graphs"] if dynamo else 0}


def facts_key(rank: int) -> str:
    """Return the store key of a rank's `process_facts`, as JSON."""
    return f"facts/{rank}"


def heartbeat_key(rank: int) -> str:
    """Return the store key of a rank's heartbeats."""
    return f"beat/{rank}"


class HeartbeatMonitor:
    """Finds the ranks that no longer respond, or hang.

    Args:
        pids: rank -> its process id; absent or None: the rank is on another machine.
    """

    def __init__(self, control: Control, pids: Mapping[int, int | None], limits: Limits) -> None:
        self._control, self._pids, self._limits = control, dict(pids), limits
        self._suspended: dict[int, ConditionTimer] = defaultdict(partial(ConditionTimer, 1.0))
        self._silent: dict[int, ConditionTimer] = defaultdict(
            partial(ConditionTimer, 2.0 * BEAT_EVERY_S)
        )
        self._seen: dict[int, tuple[str | None, float]] = {}
        self._hangs = HangDetector(limits)
        self._next = 0.0

    def find_unresponsive(self, ranks: list[int]) -> dict[int, str]:
        """Return those of the living `ranks` that no longer respond or hang, each with the
        cause."""
        found: dict[int, str] = {}
        for rank in ranks:
            if (
                self._suspended[rank].observe(is_suspended(self._pids.get(rank)))
                > self._limits.suspended_s
            ):
                found[rank] = f"stopped responding (process {self._pids[rank]} is suspended)"
        # The rest changes once per second.
        if time.monotonic() < self._next:
            return found
        self._next = time.monotonic() + BEAT_EVERY_S
        doing: dict[int, list[Stretch]] = {}
        for rank, beat in zip(
            ranks, self._control.get_all([heartbeat_key(rank) for rank in ranks]), strict=True
        ):
            pid = self._pids.get(rank)
            # Either of the two that moves is a sign of life.
            sign = (beat, cpu_seconds(pid))
            # Elsewhere nobody sees whether it computes: a library may hold Python's lock as long as
            # a stage may take.
            limit = self._limits.silent_s if pid is not None else self._limits.stage_floor_s
            said = f"stopped responding (it gave no sign of life for {limit:g} s)"
            # Not started yet, as far as this machine can see.
            if pid is None and beat is None:
                limit, key = self._limits.start_s, "limits.start_s"
                said = f"has not joined (no sign of life for {limit:g} s; {suggest_raising(key)})"
            if self._silent[rank].observe(self._seen.get(rank) == sign) > limit:
                found.setdefault(rank, said)
            self._seen[rank] = sign
            doing[rank] = _parse_stretches(beat)
        hanging = self._hangs.find_hanging_ranks(doing)
        self._ask_for_stacks([rank for rank in hanging if rank not in found])
        told = {
            rank: "; its log has the stacks of its threads"
            for rank in hanging
            if self._pids.get(rank)
        }
        # `found` comes last and wins: a rank that is gone is not called hanging.
        return {rank: cause + told.get(rank, "") for rank, cause in hanging.items()} | found

    def _ask_for_stacks(self, ranks: Sequence[int]) -> None:
        """Make `ranks`, which are about to be killed, log the stacks of their threads."""
        for rank in ranks:
            if (pid := self._pids.get(rank)) is not None:
                os.kill(pid, STACKS)
        if ranks:
            time.sleep(_STACKS_S)


def _parse_stretches(beat: str | None) -> list[Stretch]:
    """Return what a heartbeat says about the rank's threads; nothing before the first one."""
    said = json.loads(beat or "0")
    return [Stretch(*fields) for fields in said[1]] if isinstance(said, list) else []


class LauncherMonitor:
    """A small process that reports the launcher's death.

    When the launcher is killed, its ranks die with it, so none of them can report that. The monitor
    also kills a launcher that is suspended, because the ranks cannot go on without its store. Under
    a scheduler every rank has a monitor, because nothing else on its machine watches it.

    Args:
        on_death: called in the monitor's process with the cause.
        suspended_s: seconds that the launcher may be in state T.
        name: name of the launcher in the cause.
    """

    def __init__(
        self,
        on_death: Callable[[str], None],
        suspended_s: float = Limits.suspended_s,
        name: str = "the launcher",
    ) -> None:
        self._suspended_s, self._name = suspended_s, name
        self._read, self._write = os.pipe()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=self._watch_launcher, args=(os.getpid(), on_death))
        with signals_blocked():
            self._process.start()
        # The monitor alone reads.
        os.close(self._read)

    def close_in_rank(self) -> None:
        """Close a forked rank's copy of the pipe. The monitor sees the launcher's death only when
        no copy is left open."""
        os.close(self._write)

    def stop(self) -> None:
        """End the monitor, because the run ended in order."""
        with suppress(BrokenPipeError):  # somebody killed the monitor
            os.write(self._write, b".")
        os.close(self._write)
        self._process.join(timeout=1.0)
        self._process.kill()  # somebody suspended the monitor
        self._process.join()

    def _watch_launcher(self, launcher: int, on_death: Callable[[str], None]) -> None:
        gc.freeze()  # as a rank (`launch`)
        os.close(self._write)
        suspended = ConditionTimer(2 * _CHECK_S)
        while True:
            # Readable in two cases: a byte (`stop`), or end of file, since the kernel closes a dead
            # launcher's end.
            ready, _, _ = select.select([self._read], [], [], _CHECK_S)
            if ready:
                if os.read(self._read, 1):
                    os._exit(0)
                cause = f"{self._name} (process {launcher}) was killed"
                break
            if (
                suspended.observe(is_suspended(launcher)) > self._suspended_s
                and os.getppid() == launcher
            ):
                cause = f"{self._name} (process {launcher}) stopped responding (it is suspended)"
                # The check of the parent above keeps this from killing a stranger that got the
                # launcher's old pid.
                os.kill(launcher, signal.SIGKILL)  # every rank dies with it
                break
        on_death(cause)
        os._exit(0)
