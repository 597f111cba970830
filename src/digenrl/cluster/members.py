"""Membership: the rollouts of a run, as seen by the process that hosts the control store.

    a rollout asks to leave (ask/{rank})  -->  granted (leave/{rank})  -->  it exits  -->  its unfinished tasks go back
    a rollout dies                                                                    -->  its tasks go back
    a rollout joins (add_joined_rank)     -->  watched by its connections, and by a watcher on its own machine

The trainers never change. A joined rank that hangs cannot be killed from here. The store therefore
shuts it out before its tasks go back, and later results of that rank are refused
(`Claims.accepts_result`).
"""  # noqa: E501

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path

from digenrl.cluster.claims import StoredClaims
from digenrl.cluster.control import Control
from digenrl.cluster.limits import Limits
from digenrl.cluster.store import StoreServer
from digenrl.cluster.timers import ConditionTimer
from digenrl.cluster.vitals import watch_key
from digenrl.record.run_dir import JOINED, LEFT, LOST, append_event
from digenrl.schedule.claims import ClaimError, Claims

CREDENTIALS = "credentials"
"""Store key of the facts with which a joining rank compares its own, as JSON."""

_TOGETHER_S = 0.5
"""Seconds between a rollout's request to leave and the grant. A stop of the whole run may reach its
ranks before the launcher, and must not look like single rollouts that leave."""


def end_key(rank: int) -> str:
    """Return the store key under which the watcher of a joined rank says how the rank ended."""
    return f"end/{rank}"


@dataclass(frozen=True)
class Terms:
    """Conditions under which rollouts may leave or die."""

    trainers: int
    rollouts: int
    """Rollouts that the run begins with."""
    _: KW_ONLY
    max_lost: int | None = None
    """Number of rollouts that may die; None = all, 0 = none, and then none may leave either."""
    patience_s: float = 0.0
    """Seconds that a run with fewer rollouts than `fewest` waits for others to join. Then the run
    is saved and ends."""
    fewest: int = 1


class Members:
    """Tracks the rollouts of a run, and gives back the tasks of those that are gone.

    Args:
        server: this run's store.
        local: ranks whose death somebody else sees: the launcher's own processes.
    """

    def __init__(
        self,
        control: Control,
        server: StoreServer,
        terms: Terms,
        run_dir: Path,
        limits: Limits,
        local: Iterable[int],
    ) -> None:
        self._control, self._server, self._terms, self._run_dir = control, server, terms, run_dir
        self._limits, self._local = limits, frozenset(local)
        self._first = range(terms.trainers, terms.trainers + terms.rollouts)
        self._losses = 0
        self._known: set[int] = set()
        """Ranks that joined and have been logged."""
        self._asked: dict[int, float] = {}
        """rank -> when its request to leave was first seen, on the monotonic clock."""
        self._granted: dict[int, str] = {}
        """rank -> why it leaves."""
        self._silent: dict[int, ConditionTimer] = defaultdict(partial(ConditionTimer, 2.0))
        self._seen: dict[int, str | None] = {}
        self._alone_since: float | None = None
        """Second of the monotonic clock since which the run has fewer rollouts than it wants; None:
        it has enough."""
        self._last_cause, self._hopeless = "", False
        self.last_one_left = False
        """Whether the rollout that went last left as it was asked to, and did not die."""
        # The next free number. A rank that joins takes it by one atomic add.
        control.set("ranks", str(terms.trainers + terms.rollouts))

    @property
    def rollouts(self) -> list[int]:
        """Rollouts that are neither lost nor gone."""
        return self._control.surviving_ranks(self._first)

    @property
    def joined_elsewhere(self) -> list[int]:
        """Rollouts that joined and whose processes this machine does not see."""
        return [rank for rank in self._control.surviving_ranks(()) if rank not in self._local]

    @property
    def leaving(self) -> set[int]:
        """Rollouts that were allowed to leave, whether they have left or not."""
        return set(self._granted)

    @property
    def waiting(self) -> bool:
        """Whether the run has no rollout left and waits for one to join."""
        return self._alone_since is not None and not self.rollouts

    def rank_name(self, rank: int) -> str:
        """Return the name of a rank in messages."""
        return f"rank {rank} ({'trainer' if rank < self._terms.trainers else 'rollout'})"

    def check_joined_rollouts(self) -> str | None:
        """Check the rollouts that joined; called several times per second. Return why the run
        cannot go on, or None."""
        watched, connected = self.joined_elsewhere, self._server.connected_ranks()
        beats = self._control.get_all([watch_key(rank) for rank in watched])
        for rank, beat in zip(watched, beats, strict=True):
            if rank not in self._known:
                self._known.add(rank)
                append_event(self._run_dir, JOINED, {"rank": rank})
            # The watcher of the rank raises this counter every second.
            silent = self._silent[rank].observe(self._seen.get(rank) == beat)
            self._seen[rank] = beat
            refusal = None
            # Closed connections are seen at once, a machine without power only by its silence.
            if rank not in connected:
                said = self._control.get(end_key(rank))
                # The watcher outlives its rank by a word. Both are gone at once with their machine.
                refusal = self.remove_rollout(
                    rank,
                    said or "ended without a word: its connections closed",
                    machine_lost=said is None,
                )
            elif silent > self._limits.absent_s:
                refusal = self.remove_rollout(
                    rank,
                    f"stopped responding (its machine gave no sign of life for {silent:.0f} s)",
                    machine_lost=True,
                )
            if refusal is not None:
                return refusal
        return None

    def remove_rollout(self, rank: int, cause: str, machine_lost: bool = False) -> str | None:
        """Give back the tasks of a rollout that is gone. Return why the run cannot go on without
        it, or None.

        The rollout either left as it was allowed to, or died of `cause`. With `machine_lost`
        nothing is left of its machine, and its tasks are not suspected unless the rollout had
        raised an error.
        """
        left = rank in self._granted and self._control.get(f"left/{rank}") is not None
        # First of all: a rank that only seems dead must not finish a task that somebody else is
        # given.
        self._server.exclude_rank(rank)
        said, claims = (
            self._control.get(f"cause/{rank}"),
            Claims(StoredClaims(self._control), rank=-1),
        )
        # Its own words, if it could still say them, beat what others saw of its end.
        cause = f"left: {self._granted[rank]}" if left else said or cause
        # A rollout that raised an error would raise it again, so the run waits for no other.
        self._last_cause, self._hopeless = f"{self.rank_name(rank)} {cause}", said is not None
        self.last_one_left = left
        if not left and self._losses == self._terms.max_lost:
            return self._last_cause
        self._losses += not left
        # Marked before its tasks are gathered: `Claims.give_task` relies on this order.
        self._control.mark_lost(rank)
        try:
            tasks = (
                claims.offer_released_tasks(rank)
                if left
                else claims.return_lost_tasks(
                    rank, cause, self._terms.trainers, machine_lost and said is None
                )
            )
        except ClaimError as error:
            return str(error)
        facts = {"rank": rank, "cause": self._last_cause, "reissued": tasks}
        append_event(self._run_dir, LEFT if left else LOST, facts)
        return None

    def grant_leaves(self) -> int:
        """Let those go that asked and may; the signal of one that may not, 0 = none: then the run
        is to stop."""
        ranks = self.rollouts
        for rank, number in zip(
            ranks, self._control.get_all([f"ask/{rank}" for rank in ranks]), strict=True
        ):
            if number is None or rank in self._granted:
                continue
            # A run that may lose no rollout stops as a whole.
            if self._terms.max_lost == 0:
                return int(number)
            if time.monotonic() > self._asked.setdefault(rank, time.monotonic()) + _TOGETHER_S:
                self._granted[rank] = f"signal {signal.Signals(int(number)).name}"
                self._control.set(f"leave/{rank}", self._granted[rank])
        return 0

    def wait_for_exits(self, seconds: float) -> None:
        """Wait at most `seconds` after the run's end until the joined ranks have closed their
        connections to the store."""
        deadline = time.monotonic() + seconds
        while self._server.connected_ranks() and time.monotonic() < deadline:
            time.sleep(0.05)

    def check_enough_rollouts(self) -> str | None:
        """Return why a run with too few rollouts ends, once it has waited long enough for others;
        None: it goes on."""
        there, fewest = len(self.rollouts), self._terms.fewest
        if not self._terms.rollouts or there >= fewest:
            self._alone_since = None
            return None
        patience = 0.0 if self._hopeless else self._terms.patience_s
        few = (
            f"and {there} are left of at least {fewest} (allocation.rollouts.min)"
            if there
            else "the last rollout"
        )
        if self._alone_since is None:
            self._alone_since = time.monotonic()
            if patience:
                said = (
                    f"{self._last_cause}, {few}; waiting {patience:.0f} s for another (digenrl "
                    "join)"
                )
                append_event(self._run_dir, "warning", {"message": said})
        if time.monotonic() < self._alone_since + patience:
            return None
        waited = (
            f"; no other joined within {patience:.0f} s (allocation.patience_s)" if patience else ""
        )
        return self._last_cause if self._hopeless else f"{self._last_cause}, {few}{waited}"
