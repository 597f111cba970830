"""Membership: which rollouts a run has, as the process sees it that hosts the control store.

    a rollout asks to go (ask/{rank})  -->  granted (leave/{rank})  -->  it has left  -->  what it still owned goes back
    a rollout dies                                                                    -->  what it owned goes back
    a rollout joins (Control.join)     -->  watched from here on by its connections, and by who watches it over there

Trainers are fixed. A rank that joined cannot be killed from here when it stands still, so the store shuts it out before
its tasks go back: what it does from then on reaches nobody (`Claims.accepts`).
"""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from digenrl.cluster.claims import StoredClaims
from digenrl.cluster.control import Control
from digenrl.cluster.limits import Limits
from digenrl.cluster.store import StoreServer
from digenrl.cluster.vitals import ConditionTimer, watch_key
from digenrl.record.run_dir import JOINED, LEFT, LOST, append_event
from digenrl.schedule.claims import ClaimError, Claims

CREDENTIALS = "credentials"
"""Store key of what a rank that joins must show."""
_TOGETHER_S = 0.5
"""A stop of the whole run may reach its ranks before the launcher: a rollout goes so long after it asked."""


def end_key(rank: int) -> str:
    """Return the store key under which the watcher of a joined rank says how the rank ended."""
    return f"end/{rank}"


@dataclass(frozen=True)
class Terms:
    """Conditions under which rollouts may leave or die."""

    trainers: int
    rollouts: int
    """Rollouts that the run begins with."""
    max_lost: int | None = None
    """Rollouts that may die; None = all, 0 = none, and none may leave either."""
    patience_s: float = 0.0
    """How long a run with fewer rollouts than `fewest` waits for others to join."""
    fewest: int = 1


class Members:
    """The rollouts of a run, and what becomes of their tasks.

    Args:
        server: this run's store.
        local: ranks that somebody else sees die: the launcher's own processes.
    """

    def __init__(
        self, control: Control, server: StoreServer, terms: Terms, run_dir: Path, limits: Limits, local: Iterable[int]
    ) -> None:
        self._control, self._server, self._terms, self._run_dir = control, server, terms, run_dir
        self._limits, self._local = limits, frozenset(local)
        self._first = range(terms.trainers, terms.trainers + terms.rollouts)
        self._losses = 0
        self._known: set[int] = set()
        """Ranks that joined."""
        self._asked: dict[int, float] = {}
        """rank -> when it was first seen to ask, on the monotonic clock."""
        self._granted: dict[int, str] = {}
        """rank -> why it leaves."""
        self._silent: dict[int, ConditionTimer] = defaultdict(partial(ConditionTimer, 2.0))
        self._seen: dict[int, str | None] = {}
        self._alone_since: float | None = None
        """Since when there are fewer than the run wants, on the monotonic clock."""
        self._last_cause, self._hopeless = "", False
        self.last_one_left = False
        """The newest of those that are gone left as it was asked to; it did not die."""
        control.set("ranks", str(terms.trainers + terms.rollouts))

    @property
    def rollouts(self) -> list[int]:
        """Rollouts that are there."""
        return self._control.survivors(self._first)

    @property
    def guests(self) -> list[int]:
        """Rollouts that joined, whose processes nobody sees from here."""
        return [rank for rank in self._control.survivors(()) if rank not in self._local]

    @property
    def leaving(self) -> set[int]:
        """Rollouts that were allowed to leave, whether they have left or not."""
        return set(self._granted)

    @property
    def waiting(self) -> bool:
        """Whether the run has no rollout left, and waits for one."""
        return self._alone_since is not None and not self.rollouts

    def name(self, rank: int) -> str:
        """What messages call a rank."""
        return f"rank {rank} ({'trainer' if rank < self._terms.trainers else 'rollout'})"

    def watch(self) -> str | None:
        """Look after those that joined; called several times per second. Why the run cannot go on, if it cannot."""
        guests, connected = self.guests, self._server.connected()
        beats = self._control.get_all([watch_key(rank) for rank in guests])
        for rank, beat in zip(guests, beats, strict=True):
            if rank not in self._known:
                self._known.add(rank)
                append_event(self._run_dir, JOINED, {"rank": rank})
            silent = self._silent[rank].observe(self._seen.get(rank) == beat)
            self._seen[rank] = beat
            refusal = None
            if rank not in connected:
                cause = self._control.get(end_key(rank)) or "ended without a word: its connections closed"
                refusal = self.gone(rank, cause)
            elif silent > self._limits.absent_s:
                refusal = self.gone(rank, f"stopped responding (its machine gave no sign of life for {silent:.0f} s)")
            if refusal is not None:
                return refusal
        return None

    def gone(self, rank: int, cause: str) -> str | None:
        """Give back the tasks of a rollout that is no more; return why the run cannot go on without it, if it cannot.

        The rollout left as it was allowed to, or else died of `cause`.
        """
        left = rank in self._granted and self._control.get(f"left/{rank}") is not None
        self._server.shut_out(rank)
        said, claims = self._control.get(f"cause/{rank}"), Claims(StoredClaims(self._control), rank=-1)
        cause = f"left: {self._granted[rank]}" if left else said or cause
        self._last_cause, self._hopeless = f"{self.name(rank)} {cause}", said is not None
        self.last_one_left = left
        if not left and self._losses == self._terms.max_lost:
            return self._last_cause
        self._losses += not left
        self._control.lose(rank)
        try:
            tasks = claims.collect(rank) if left else claims.lose(rank, cause, self._terms.trainers)
        except ClaimError as error:
            return str(error)
        facts = {"rank": rank, "cause": self._last_cause, "reissued": tasks}
        append_event(self._run_dir, LEFT if left else LOST, facts)
        return None

    def grant_leaves(self) -> int:
        """Let those go that asked and may; the signal of one that may not, 0 = none: then the run is to stop."""
        ranks = self.rollouts
        for rank, number in zip(ranks, self._control.get_all([f"ask/{rank}" for rank in ranks]), strict=True):
            if number is None or rank in self._granted:
                continue
            if self._terms.max_lost == 0:
                return int(number)
            if time.monotonic() > self._asked.setdefault(rank, time.monotonic()) + _TOGETHER_S:
                self._granted[rank] = f"signal {signal.Signals(int(number)).name}"
                self._control.set(f"leave/{rank}", self._granted[rank])
        return 0

    def see_off(self, seconds: float) -> None:
        """The run is over: wait until those that joined have let go of the store."""
        deadline = time.monotonic() + seconds
        while self._server.connected() and time.monotonic() < deadline:
            time.sleep(0.05)

    def abandoned(self) -> str | None:
        """Why a run with too few rollouts ends, once it has waited long enough for others."""
        there, fewest = len(self.rollouts), self._terms.fewest
        if not self._terms.rollouts or there >= fewest:
            self._alone_since = None
            return None
        patience = 0.0 if self._hopeless else self._terms.patience_s
        few = f"and {there} are left of at least {fewest} (allocation.rollouts.min)" if there else "the last rollout"
        if self._alone_since is None:
            self._alone_since = time.monotonic()
            if patience:
                said = f"{self._last_cause}, {few}; waiting {patience:.0f} s for another (digenrl join)"
                append_event(self._run_dir, "warning", {"message": said})
        if time.monotonic() < self._alone_since + patience:
            return None
        waited = f"; no other joined within {patience:.0f} s (allocation.patience_s)" if patience else ""
        return f"{self._last_cause}, {few}{waited}"
