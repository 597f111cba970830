"""What comes to a rollout rank between two tasks, and the record of its waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

from digenrl.strategy.setup import RankRuntime
from digenrl.transport.suspended import Suspended
from digenrl.transport.weights import Arrivals, Version
from digenrl.transport.wire import Message, MessageKind

_WAIT_S = 0.2
"""Longest wait for a message before a free rank looks at everything again."""


class RolloutMail:
    """Sorts what arrives on a rollout rank, and records how long the rank waited for it.

    Used as a context, which ends the heartbeat's stage of a wait in progress.

    Args:
        hold_evaluated: keeps weights that an evaluation is of, where rollouts do not use them.
    """

    def __init__(self, runtime: RankRuntime, hold_evaluated: Callable[[Version], None]) -> None:
        self._hold_evaluated = hold_evaluated
        self._world, self._control = runtime.setup.world, runtime.control
        self._link, self._spans = runtime.link, runtime.spans
        self._arrivals = Arrivals(runtime.setup.engine.policy.adapter.trained_parameters())
        self.weights: deque[Version] = deque()
        """Versions to take into use, in the order in which they were published."""
        self.suspended: deque[Suspended] = deque()
        """Tasks of ranks that left, which this rank goes on with."""
        self._asked = False
        """Whether this rank, which joined, has asked for weights."""
        self._idle_since: float | None = None
        self._idle = ExitStack()
        """Stage of the wait in progress, for heartbeats."""

    def __enter__(self) -> RolloutMail:
        self._idle.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._idle.close()

    def receive_messages(self, timeout: float = 0.0) -> None:
        """Sort arriving messages; wait up to `timeout` seconds for the first."""
        while (message := self._link.receive(timeout)) is not None:
            # Wait for the first message alone; the rest is what has arrived by then.
            timeout = 0.0
            if message.kind is MessageKind.WEIGHTS:
                version = self._arrivals.add_message(message)
                # Numbers below 0 are those of evaluations' weights.
                if version is not None and version.number < 0:
                    self._hold_evaluated(version)
                elif version is not None:
                    self.weights.append(version)
            elif message.kind is MessageKind.STATE:
                self.suspended.append(Suspended.from_message(message, self._world.rank))

    def has_older_version(self, version: int) -> bool:
        """Return whether an older version than `version` was published again, because one of its
        tasks lost its owner."""
        return bool(self.weights) and self.weights[0].number < version

    def wait_for_message(self, version: int) -> None:
        """Spend a moment without work, with `version` in use (-1: none yet)."""
        # One wait spans many calls: it ends when this rank gets work.
        if self._idle_since is None:
            self._idle_since = self._spans.now()
            cause = "wait startup" if version < 0 else "wait weights"
            self._idle.enter_context(self._spans.stage(cause))
        if version < 0 and self._world.joined:
            self._ask_for_weights()
        self.receive_messages(_WAIT_S)

    def end_wait(self, cause: str) -> None:
        """End the wait in progress, if there is one, and record its cause."""
        if self._idle_since is not None:
            self._idle.close()
            self._spans.add_span("wait", self._idle_since, self._spans.now(), cause=cause)
            self._idle_since = None

    def _ask_for_weights(self) -> None:
        """Ask trainer 0 for its newest weights, because this rank joined. Versions that are
        published from now on come by themselves."""
        # Before the first publication there is nothing to ask for, and it will reach this rank too.
        if not self._asked and self._control.get("version") is not None:
            self._asked = True
            self._link.send(0, Message(MessageKind.ASK, {"rank": self._world.rank}))
