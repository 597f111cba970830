"""The control plane: claims, versions, states and flags on a c10d store that the launcher hosts (never a rank).

Every wait is bounded by the abort flag: `check` raises `Aborted` with the cause that somebody wrote, so no rank hangs
on a peer that is gone. Operations cost about 15 microseconds (one TCP round trip); a client serialises its calls, so
each thread that waits uses its own clone.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import torch.distributed as dist


class Aborted(RuntimeError):
    """The run is over for this rank: another rank or the launcher gave the cause."""


class Control:
    """A rank's view of the control store.

    Args:
        store: c10d store, already prefixed for this run (and restart).
        rank: launch rank, for messages.
        patience: longest wait in seconds for something that another rank must do; expired = `Aborted`.
    """

    def __init__(self, store: dist.Store, rank: int, patience: float = 1800.0) -> None:
        self._store, self._rank, self._patience = store, rank, patience
        self._lock = threading.Lock()

    def claim(self, queue_name: str) -> int:
        """The next number of a queue, from 0: one atomic add."""
        with self._lock:
            return int(self._store.add(f"claim/{queue_name}", 1)) - 1

    def claimed(self, queue_name: str) -> int:
        """How many numbers of a queue have been claimed."""
        with self._lock:
            return int(self._store.add(f"claim/{queue_name}", 0))

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self._store.set(key, value)

    def get(self, key: str) -> str | None:
        """The value, or None if nobody has set it."""
        with self._lock:
            return self._store.get(key).decode() if self._store.check([key]) else None

    def wait_for(self, key: str, what: str) -> str:
        """The value of `key` as soon as it is there.

        Raises:
            Aborted: the run was aborted, or nothing came within the patience.
        """
        deadline = time.monotonic() + self._patience
        pause = 0.001
        while (value := self.get(key)) is None:
            self.check()
            if time.monotonic() > deadline:
                raise Aborted(f"rank {self._rank} waited {self._patience:.0f} s for {what}; nobody gave it in time.")
            time.sleep(pause)
            pause = min(0.05, 2 * pause)
        return value

    def check(self) -> None:
        """Raise `Aborted` with its cause if anybody has aborted the run."""
        try:
            cause = self.get("abort")
        except (RuntimeError, ConnectionError) as error:  # DistNetworkError is a RuntimeError
            raise Aborted(f"rank {self._rank} lost the control store: the launcher is gone ({error}).") from error
        if cause is not None:
            raise Aborted(f"rank {self._rank} stops: {cause}")

    def abort(self, cause: str) -> None:
        """Tell every rank to stop; the first cause is the one that counts."""
        if self.get("abort") is None:
            self.set("abort", cause)

    def request_stop(self, cause: str) -> None:
        """Ask for a clean stop after the step in progress; the first cause is the one that counts."""
        if self.get("stop") is None:
            self.set("stop", cause)

    @property
    def stopping(self) -> bool:
        """Whether somebody asked for a clean stop (Ctrl-C, SIGTERM, too many missing rewards)."""
        return self.get("stop") is not None


def host_store(host: str, port: int = 0) -> dist.TCPStore:
    """The store server, in the launcher's process, on `port` (0 = a free one).

    Raises:
        OSError: no port could be bound on `host`.
    """
    try:
        return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    except dist.DistError as error:
        raise OSError(f"cannot host the control store on {host}: {error}") from error


def join_store(host: str, port: int, prefix: str) -> dist.Store:
    """A client of the launcher's store, under the run's prefix."""
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    return dist.PrefixStore(prefix, store)
