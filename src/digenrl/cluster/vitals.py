"""Signs of life. Ranks beat, the launcher looks; a witness looks at the launcher.

Every rank sets one key per second from a thread of its own, and only the launcher reads them, all in one round trip. A
rank that is suspended (SIGSTOP stops all of its threads) is seen in /proc within seconds. A rank whose heart stands
still is left alone as long as it uses the processor: a library that computes or compiles may hold Python's lock for
long. Time counts by the observer's own looks, so one that was itself suspended (Ctrl-Z, then fg) sees nobody die.
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
from digenrl.cluster.world import Session

BEAT_EVERY_S = 1.0
SUSPENDED_LIMIT_S = 3.0
"""A process in state T (SIGSTOP, a debugger) for this long counts as dead."""
SILENT_LIMIT_S = 30.0
"""So does a rank that neither beats nor uses the processor; not less, because a file server may stall a process."""
_LOOK_S = 0.5
"""The witness looks this often; no look counts for more than twice that, whatever the clock says."""


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


class Lasting:
    """How long a condition has lasted, by the looks of its observer."""

    def __init__(self, most: float) -> None:
        self._most, self._last, self.seconds = most, time.monotonic(), 0.0

    def look(self, true: bool) -> float:
        """Seconds that the condition has lasted; one look counts at most `most` seconds."""
        now = time.monotonic()
        self.seconds = self.seconds + min(now - self._last, self._most) if true else 0.0
        self._last = now
        return self.seconds


def beat(session: Session, rank: int) -> None:
    """Start this rank's heart: a thread that beats until the process or the store ends."""

    def run() -> None:
        count = 0
        try:
            control = Control(join_store(session.store_host, session.store_port, session.prefix), rank)
            while True:
                count += 1
                control.set(beat_key(rank), str(count))
                time.sleep(BEAT_EVERY_S)
        except RuntimeError:  # the store is gone; whoever waits for it says so
            return

    threading.Thread(target=run, name=f"heart-{rank}", daemon=True).start()


def beat_key(rank: int) -> str:
    """Where a rank's beats are counted; the launcher sets all of them when the store begins."""
    return f"beat/{rank}"


class Pulse:
    """The launcher's look at its ranks."""

    def __init__(self, control: Control, pids: Mapping[int, int | None]) -> None:
        self._control, self._pids = control, dict(pids)
        self._suspended = {rank: Lasting(1.0) for rank in pids}
        self._silent = {rank: Lasting(2.0 * BEAT_EVERY_S) for rank in pids}
        self._seen: dict[int, tuple[str | None, int]] = {}
        self._next = 0.0

    def look(self, ranks: list[int]) -> dict[int, str]:
        """Of the living `ranks`, those that no longer respond, and how that shows."""
        found: dict[int, str] = {}
        for rank in ranks:
            if self._suspended[rank].look(is_suspended(self._pids[rank])) > SUSPENDED_LIMIT_S:
                found[rank] = f"stopped responding (process {self._pids[rank]} is suspended)"
        if time.monotonic() < self._next:
            return found
        self._next = time.monotonic() + BEAT_EVERY_S
        for rank, count in zip(ranks, self._control.get_all([beat_key(rank) for rank in ranks]), strict=True):
            sign = (count, cpu_ticks(self._pids[rank]))
            if self._silent[rank].look(self._seen.get(rank) == sign) > SILENT_LIMIT_S:
                found.setdefault(
                    rank,
                    f"stopped responding (process {self._pids[rank]} gave no sign of life for {SILENT_LIMIT_S:.0f} s)",
                )
            self._seen[rank] = sign
        return found


class Witness:
    """A process that outlives the launcher by a moment: when the launcher is killed, its ranks die with it, and
    somebody must still say so. It also ends a run whose launcher was suspended, with the store inside.

    Args:
        on_death: called in the witness with the cause.
    """

    def __init__(self, on_death: Callable[[str], None]) -> None:
        self._read, self._write = os.pipe()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=self._watch, args=(os.getpid(), on_death))
        self._process.start()
        os.close(self._read)

    def ignore(self) -> None:
        """In a forked rank: let go of the pipe, whose end means that the launcher is dead."""
        os.close(self._write)

    def dismiss(self) -> None:
        """The run ended in order."""
        with suppress(BrokenPipeError):  # somebody killed the witness
            os.write(self._write, b".")
        os.close(self._write)
        self._process.join(timeout=5.0)

    def _watch(self, launcher: int, on_death: Callable[[str], None]) -> None:
        os.close(self._write)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # the terminal sends them to everybody; the launcher decides
        suspended = Lasting(2 * _LOOK_S)
        while True:
            ready, _, _ = select.select([self._read], [], [], _LOOK_S)
            if ready:
                if os.read(self._read, 1):
                    os._exit(0)
                cause = f"the launcher (process {launcher}) was killed"
                break
            if suspended.look(is_suspended(launcher)) > SUSPENDED_LIMIT_S and os.getppid() == launcher:
                cause = f"the launcher (process {launcher}) stopped responding (it is suspended)"
                os.kill(launcher, signal.SIGKILL)  # every rank dies with it
                break
        on_death(cause)
        os._exit(0)
