"""Signs of life: the launcher monitors its ranks, and a small process monitors the launcher.

    rank      -- a counter on the control store, once per second, from a thread of its own -->  launcher
    launcher  -- the end of a pipe, and its state in /proc -->  LauncherMonitor

A suspended rank (SIGSTOP stops all of its threads) is seen in /proc within seconds. A rank without heartbeat counts as
dead only if it uses no processor time either: a library that computes or compiles may hold Python's lock for long.
Time is counted by the observer's own observations, so a launcher that was itself suspended (Ctrl-Z, then fg) finds
nobody dead.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from digenrl.cluster.control import Control, join_store
from digenrl.cluster.signals import held_back, obeyed
from digenrl.cluster.world import Session

BEAT_EVERY_S = 1.0
SUSPENDED_LIMIT_S = 3.0
"""A process in state T (SIGSTOP, a debugger) for this long counts as dead."""
SILENT_LIMIT_S = 30.0
"""So does a rank without heartbeat and processor time; not less, because a file server may stall a process."""
_CHECK_S = 0.5
"""The launcher is checked this often; no check counts for more than twice that, whatever the clock says."""


def is_suspended(pid: int | None) -> bool:
    """Whether a process is in state T (stopped by a signal)."""
    stat = _stat(pid)
    return stat is not None and stat[0] in "Tt"


def cpu_ticks(pid: int | None) -> int:
    """Processor time that a process has used, in clock ticks; 0 for one that is gone."""
    stat = _stat(pid)
    return 0 if stat is None else int(stat[11]) + int(stat[12])


def _stat(pid: int | None) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None


def oom_kills() -> int:
    """Processes that the kernel has killed for lack of memory: in this process's cgroup where it counts them, else on
    this machine."""
    cgroups = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    for path in (
        f"/sys/fs/cgroup{cgroups.get('', '')}/memory.events",
        f"/sys/fs/cgroup/memory{cgroups.get('memory', '')}/memory.oom_control",
        "/proc/vmstat",
    ):
        with suppress(OSError):
            counts = [line.split()[1] for line in Path(path).read_text().splitlines() if line.startswith("oom_kill ")]
            if counts:
                return int(counts[0])
    return 0


class ConditionTimer:
    """How long a condition has held, by the observer's own observations."""

    def __init__(self, most: float) -> None:
        self._most, self._last, self.seconds = most, time.monotonic(), 0.0

    def observe(self, true: bool) -> float:
        """Seconds that the condition has held; one observation counts at most `most` seconds."""
        now = time.monotonic()
        self.seconds = self.seconds + min(now - self._last, self._most) if true else 0.0
        self._last = now
        return self.seconds


def start_heartbeat(session: Session, rank: int) -> None:
    """Count up once per second, in a thread of its own, until the process or the store ends; pass a stop signal on."""

    def run() -> None:
        count = 0
        try:
            control = Control(join_store(session.store_host, session.store_port, session.prefix), rank)
            while True:
                count += 1
                control.set(heartbeat_key(rank), str(count))
                if (caught := signal.sigtimedwait(obeyed(), BEAT_EVERY_S)) is not None:
                    control.set("signal", str(caught.si_signo))
        except RuntimeError:  # the store is gone; whoever waits for it says so
            return

    threading.Thread(target=run, name=f"heartbeat-{rank}", daemon=True).start()


def heartbeat_key(rank: int) -> str:
    """Where a rank counts its heartbeats; the launcher sets all of them when the store begins."""
    return f"beat/{rank}"


class HeartbeatMonitor:
    """Tells the launcher which of its ranks no longer respond."""

    def __init__(self, control: Control, pids: Mapping[int, int | None]) -> None:
        self._control, self._pids = control, dict(pids)
        self._suspended = {rank: ConditionTimer(1.0) for rank in pids}
        self._silent = {rank: ConditionTimer(2.0 * BEAT_EVERY_S) for rank in pids}
        self._seen: dict[int, tuple[str | None, int]] = {}
        self._next = 0.0

    def unresponsive(self, ranks: list[int]) -> dict[int, str]:
        """Of the living `ranks`, those that no longer respond, each with the cause."""
        found: dict[int, str] = {}
        for rank in ranks:
            if self._suspended[rank].observe(is_suspended(self._pids[rank])) > SUSPENDED_LIMIT_S:
                found[rank] = f"stopped responding (process {self._pids[rank]} is suspended)"
        if time.monotonic() < self._next:
            return found
        self._next = time.monotonic() + BEAT_EVERY_S
        for rank, count in zip(ranks, self._control.get_all([heartbeat_key(rank) for rank in ranks]), strict=True):
            sign = (count, cpu_ticks(self._pids[rank]))
            if self._silent[rank].observe(self._seen.get(rank) == sign) > SILENT_LIMIT_S:
                found.setdefault(
                    rank,
                    f"stopped responding (process {self._pids[rank]} gave no sign of life for {SILENT_LIMIT_S:.0f} s)",
                )
            self._seen[rank] = sign
        return found


class LauncherMonitor:
    """A process of its own that reports the launcher's death. When the launcher is killed, its ranks die with it, so
    none of them can. It also kills a launcher that is suspended, because the ranks cannot go on without its store.

    Args:
        on_death: called in that process with the cause.
    """

    def __init__(self, on_death: Callable[[str], None]) -> None:
        self._read, self._write = os.pipe()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=self._watch, args=(os.getpid(), on_death))
        with held_back():
            self._process.start()
        os.close(self._read)

    def close_in_rank(self) -> None:
        """In a forked rank: close this copy of the pipe. Its end means that the launcher is dead."""
        os.close(self._write)

    def stop(self) -> None:
        """The run ended in order."""
        with suppress(BrokenPipeError):  # somebody killed the monitor
            os.write(self._write, b".")
        os.close(self._write)
        self._process.join(timeout=1.0)
        self._process.kill()  # somebody suspended the monitor
        self._process.join()

    def _watch(self, launcher: int, on_death: Callable[[str], None]) -> None:
        os.close(self._write)
        suspended = ConditionTimer(2 * _CHECK_S)
        while True:
            ready, _, _ = select.select([self._read], [], [], _CHECK_S)
            if ready:
                if os.read(self._read, 1):
                    os._exit(0)
                cause = f"the launcher (process {launcher}) was killed"
                break
            if suspended.observe(is_suspended(launcher)) > SUSPENDED_LIMIT_S and os.getppid() == launcher:
                cause = f"the launcher (process {launcher}) stopped responding (it is suspended)"
                os.kill(launcher, signal.SIGKILL)  # every rank dies with it
                break
        on_death(cause)
        os._exit(0)
