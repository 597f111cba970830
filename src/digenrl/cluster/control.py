"""The control plane: claims, versions, states and flags on a c10d store that the launcher hosts (never a rank).

Every wait is bounded by the abort flag: `check` raises `Aborted` with the cause that somebody wrote, so no rank hangs
on a peer that is gone. Operations cost about 15 microseconds (one TCP round trip); a client serialises its calls, so
each thread that waits uses its own clone.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist

from digenrl.cluster.limits import Limits


class Aborted(RuntimeError):
    """The run is over for this rank: another rank or the launcher gave the cause."""


class PeerLost(RuntimeError):
    """A rank died, and the run goes on without it."""


class Control:
    """A rank's view of the control store.

    Args:
        store: c10d store, already prefixed for this run (and restart).
        rank: launch rank, for messages.
        patience: longest wait in seconds for something that another rank must do; expired = `Aborted`.
    """

    def __init__(self, store: dist.Store, rank: int, patience: float = Limits.start_s) -> None:
        self._store, self._rank, self._patience = store, rank, patience
        self._lock = threading.Lock()

    def add(self, key: str, amount: int) -> int:
        """The sum after adding, from 0: atomic."""
        with self._lock:
            return int(self._store.add(key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bool:
        """Set `key` to `desired` if it holds `expected` ("" = nobody has set it): atomic. `desired` must be a value
        that the key does not hold yet."""
        with self._lock:
            return bool(self._store.compare_set(key, expected, desired).decode() == desired)

    def delete(self, key: str) -> None:
        with self._lock:
            self._store.delete_key(key)

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self._store.set(key, value)

    def get(self, key: str) -> str | None:
        """The value, or None if nobody has set it."""
        with self._lock:
            return self._store.get(key).decode() if self._store.check([key]) else None

    def get_all(self, keys: Sequence[str]) -> list[str | None]:
        """The values of `keys`, in two round trips; all None unless every key is set."""
        with self._lock:
            if not keys or not self._store.check(list(keys)):
                return [None] * len(keys)
            return [value.decode() for value in self._store.multi_get(list(keys))]

    def lose(self, rank: int) -> None:
        """Mark a rank as dead while the run goes on; what it announced no longer counts. The launcher alone does so."""
        self.set("lost", " ".join(str(lost) for lost in sorted(self.lost_ranks() | {rank})))
        self.set(f"work/{rank}", "")

    def lost_ranks(self) -> frozenset[int]:
        """Ranks that died while the run went on."""
        return frozenset(int(rank) for rank in (self.get("lost") or "").split())

    def survivors(self, ranks: Iterable[int]) -> list[int]:
        """Those of `ranks` that are not lost."""
        lost = self.lost_ranks()
        return [rank for rank in ranks if rank not in lost]

    def goes_on_without(self, rank: int, seconds: float) -> bool:
        """Whether the run goes on without `rank`, to which a connection broke: the launcher says so within `seconds`.

        Raises:
            Aborted: it does not, and the cause is known.
        """
        deadline = time.monotonic() + seconds
        while not (lost := rank in self.lost_ranks()) and time.monotonic() < deadline:
            self.check()
            time.sleep(0.05)
        return lost

    def wait_for(self, key: str, what: str, rank: int | None = None) -> str:
        """The value of `key` as soon as it is there.

        Raises:
            Aborted: the run was aborted, or nothing came within the patience.
            PeerLost: `rank`, which was to set it, died while the run goes on.
        """
        deadline = time.monotonic() + self._patience
        pause = 0.001
        while (value := self.get(key)) is None:
            self.check()
            if rank is not None and rank in self.lost_ranks():
                raise PeerLost(f"rank {rank} is lost: {what} will not come.")
            if time.monotonic() > deadline:
                raise Aborted(f"rank {self._rank} waited {self._patience:.0f} s (limits.start_s) for {what}.")
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

    def report(self, fatal: bool, error: BaseException) -> None:
        """Leave this rank's error for the launcher; `fatal` (a trainer's): nobody can go on without this rank."""
        cause = f"raised {type(error).__name__}: {error}"
        try:
            self.set(f"cause/{self._rank}", cause)
            if fatal:
                self.abort(f"rank {self._rank} (trainer) {cause}")
        except RuntimeError:
            print(f"rank {self._rank} {cause}; the control store is gone, so is the launcher", file=sys.stderr)

    def request_stop(self, cause: str) -> None:
        """Ask for a clean stop after the step in progress; the first cause is the one that counts."""
        if self.get("stop") is None:
            self.set("stop", cause)

    @property
    def stopping(self) -> bool:
        """Whether somebody asked for a clean stop (Ctrl-C, SIGTERM, too many missing rewards)."""
        return self.get("stop") is not None


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket for `host_store`. Who connects before the store serves it waits in its backlog.

    Raises:
        OSError: no port could be bound on `host`.
    """
    return socket.create_server((host, port), backlog=4096)


def host_store(host: str, port: int = 0, listener: socket.socket | None = None) -> dist.TCPStore:
    """The store server, in the launcher's process, on `listener` (which it takes over) or on `port` (0 = a free one).

    Raises:
        OSError: no port could be bound on `host`.
    """
    handle = None if listener is None else listener.detach()
    timeout = timedelta(seconds=60)
    try:
        return dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=handle
        )
    except dist.DistError as error:
        raise OSError(f"cannot host the control store on {host}: {error}") from error


def join_store(host: str, port: int, prefix: str) -> dist.Store:
    """A client of the launcher's store, under the run's prefix."""
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    return dist.PrefixStore(prefix, store)
