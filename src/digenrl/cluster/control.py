"""The control plane: claims, versions, states and flags on the run's store, which no rank hosts
under a launcher.

No rank waits for ever for a peer that is gone: every wait ends when somebody aborts the run.
`check_abort` then raises `Aborted` with the written cause. One operation costs one TCP round trip.
Threads that share a client take turns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from digenrl.cluster.limits import Limits
from digenrl.cluster.store import StoreClient, StoreLost


class Aborted(RuntimeError):
    """The run is over for this rank: another rank or the launcher gave the cause."""


class PeerLost(RuntimeError):
    """A rank died, and the run goes on without it."""


class Control:
    """A rank's view of the control store.

    Args:
        store: this run's store.
        rank: launch rank, for messages.
        patience: longest wait in seconds for something that another rank must do; expired =
            `Aborted`.
    """

    def __init__(self, store: StoreClient, rank: int, patience: float = Limits.start_s) -> None:
        self.store, self._rank, self._patience = store, rank, patience

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the counter `key` (0 at first) and return the sum: atomic."""
        return self.store.add(key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bool:
        """Set `key` to `desired` if its value is `expected` ("" = nobody has set it): atomic.
        Return whether it was set."""
        return self.store.compare_and_swap(key, expected, desired)

    def delete(self, key: str) -> None:
        self.store.delete_key(key)

    def set(self, key: str, value: str) -> None:
        """Set `key` for all ranks."""
        self.store.set(key, value)

    def get(self, key: str) -> str | None:
        """Return the value of `key`, or None if nobody has set it."""
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[str]) -> list[str | None]:
        """Return the values of `keys` at one moment, None for each key that nobody has set."""
        return [None if value is None else value.decode() for value in self.store.read_values(keys)]

    def add_joined_rank(self, rank: int) -> None:
        """Add `rank`, which joined the running run, to the rollouts."""
        # Several ranks may join at once: try again with the new list until no other rank came in
        # between.
        while not self.compare_set(
            "joined", before := self.get("joined") or "", f"{before} {rank}".strip()
        ):
            pass

    def joined_ranks(self) -> list[int]:
        """Return the ranks that joined after the run had begun, including those that are gone."""
        return [int(rank) for rank in (self.get("joined") or "").split()]

    def mark_lost(self, rank: int) -> None:
        """Mark `rank` as gone, and delete what it announced. Only the process that hosts the store
        may call this."""
        self.set(f"work/{rank}", "")
        # Read, then write: safe only because one process alone writes this key.
        self.set("lost", " ".join(str(lost) for lost in sorted(self.lost_ranks() | {rank})))

    def lost_ranks(self) -> frozenset[int]:
        """Return the ranks that died or left while the run went on."""
        return frozenset(int(rank) for rank in (self.get("lost") or "").split())

    def surviving_ranks(self, ranks: Iterable[int]) -> list[int]:
        """Return the members of `ranks`, and the ranks that joined, that are not lost."""
        joined, lost = ((text or "").split() for text in self.get_all(["joined", "lost"]))
        return [rank for rank in (*ranks, *map(int, joined)) if str(rank) not in lost]

    def goes_on_without(self, rank: int, seconds: float) -> bool:
        """Wait up to `seconds` for the launcher to declare `rank` lost, after a connection to it
        broke. Return whether it did.

        Raises:
            Aborted: the run was aborted; the error has the cause.
        """
        deadline = time.monotonic() + seconds
        while not (lost := rank in self.lost_ranks()) and time.monotonic() < deadline:
            self.check_abort()
            time.sleep(0.05)
        return lost

    def wait_for(self, key: str, what: str, rank: int | None = None) -> str:
        """Wait until `key` has a value, and return the value.

        Raises:
            Aborted: the run was aborted, or the patience is over.
            PeerLost: `rank`, which was to set the key, died while the run goes on.
        """
        deadline = time.monotonic() + self._patience
        # Short at first, because most keys are there within milliseconds; then 20 requests a
        # second.
        pause = 0.001
        while (value := self.get(key)) is None:
            self.check_abort()
            if rank is not None and rank in self.lost_ranks():
                raise PeerLost(f"rank {rank} is lost: {what} will not come.")
            if time.monotonic() > deadline:
                raise Aborted(
                    f"rank {self._rank} waited {self._patience:.0f} s (limits.start_s) for {what}."
                )
            time.sleep(pause)
            pause = min(0.05, 2 * pause)
        return value

    def check_abort(self, *keys: str) -> list[str | None]:
        """Return the values of `keys`, as `get_all`.

        Raises:
            Aborted: somebody has aborted the run; the error has the cause.
        """
        try:
            # The flag and the keys travel in one round trip.
            cause, *values = self.get_all(["abort", *keys])
        except StoreLost as error:
            raise Aborted(
                f"rank {self._rank} lost the control store: the launcher is gone ({error})."
            ) from error
        if cause is not None:
            raise Aborted(f"rank {self._rank} stops: {cause}")
        return values

    def abort_run(self, cause: str) -> None:
        """Tell every rank to stop because of `cause`. A cause that was published earlier stays."""
        self.compare_set("abort", "", cause)

    def await_abort(self, seconds: float) -> None:
        """Wait until somebody has aborted the run, at most `seconds`.

        A rank calls this when its collective broke. The lost peer is the cause, and the watcher of
        that peer reports it within seconds.
        """
        deadline = time.monotonic() + seconds
        with suppress(StoreLost):
            while self.get("abort") is None and time.monotonic() < deadline:
                time.sleep(0.05)

    def report_error(self, fatal: bool, error: BaseException, has_log: bool = True) -> None:
        """Publish this rank's error for the launcher. `fatal` aborts the run, because no run goes
        on without a trainer. `has_log`: whether the rank writes a log of its own."""
        cause = f"raised {type(error).__name__}: {error}"
        if has_log:
            cause += f"; see logs/rank-{self._rank:03d}.log"
        try:
            self.set(f"cause/{self._rank}", cause)
            if fatal:
                self.abort_run(f"rank {self._rank} (trainer) {cause}")
        except StoreLost:
            print(
                f"rank {self._rank} {cause}; the control store is gone, so is the launcher",
                file=sys.stderr,
            )

    def request_stop(self, cause: str) -> None:
        """Ask for a clean stop after the step in progress. A cause that was published earlier
        stays."""
        self.compare_set("stop", "", cause)

    @property
    def stopping(self) -> bool:
        """Whether somebody asked for a clean stop (Ctrl-C, SIGTERM, too many missing rewards)."""
        return self.get("stop") is not None
