"""The fragment stream of a trainer rank: what the Strategy gives Lightning in place of the train
dataloader.

    rollout ranks, lending trainers --cells, rewards--> Inbox: one StepBoard per RL step
    FragmentStream: waits for the next complete fragment    (`FragmentSource`: a lending trainer generates meanwhile)
                    -> yields its micro-batches -> Lightning: training_step, backward
    after the last micro-batch of an update: reduction, optimizer step; after the last update:
    publication, which lets rollout ranks begin what waits for the new version

The stream is *sized*: an unsized loader makes Lightning fetch the next batch's first fragment
before the optimizer step, which on-policy never comes. One Lightning epoch is one RL step, so `len`
is the number of micro-batches of one logical batch.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from digenrl.schedule import ScheduleSpec, fragments
from digenrl.schedule.claims import Claims
from digenrl.schedule.policy import SchedulePolicy
from digenrl.strategy.shared import TrainerState
from digenrl.strategy.step_ledger import StepLedger
from digenrl.strategy.stop_vote import StopVote
from digenrl.transport.cells import Part, StepBoard
from digenrl.transport.link import Link
from digenrl.transport.wire import Message, MessageKind
from digenrl.types import TrainBatch


class FragmentSource(Protocol):
    """Supplier of fragments: ranks that generate (`tasks.Lending`)."""

    def predicted_end(self, step: int) -> float | None:
        """Return the second of the run's clock at which RL step `step`, which begins, should end.
        None: unknown."""

    def next_fragment(
        self, board: StepBoard, update: int, pending: Sequence[tuple[int, ...]]
    ) -> tuple[int, ...]:
        """Wait for a fragment of `pending` that can be trained now, and return it."""


class Inbox:
    """Sorts what arrives on a trainer rank into the boards of the RL steps.

    Args:
        new_board: RL step -> an empty board.
    """

    def __init__(
        self,
        link: Link,
        claims: Claims,
        policy: SchedulePolicy,
        ledger: StepLedger,
        new_board: Callable[[int], StepBoard],
    ) -> None:
        self._link, self._claims, self._policy, self._ledger = link, claims, policy, ledger
        self._new_board = new_board
        self._handlers: dict[MessageKind, Callable[[Message], None]] = {}
        self._boards: dict[int, StepBoard] = {}
        self._step = 0

    def handle(self, kind: MessageKind, handler: Callable[[Message], None]) -> None:
        """Give messages of `kind`, which are no cells, to `handler`."""
        self._handlers[kind] = handler

    def open(self, step: int) -> StepBoard:
        """Return the board of RL step `step`, which is in progress, and forget those of earlier
        steps."""
        self._step = step
        self._boards = {number: board for number, board in self._boards.items() if number >= step}
        return self._board(step)

    def receive(self, timeout: float) -> bool:
        """Take one message. Return False if none came within `timeout` seconds."""
        message = self._link.receive(timeout)
        if message is None:
            return False
        if (handler := self._handlers.get(message.kind)) is not None:
            handler(message)
        if message.kind is MessageKind.CELLS:
            part = Part(message)
            step, version = part.meta["step"], part.meta["version"]
            # Refused: a late result of a task that went back when its owner was lost. Its new owner
            # sends the same cells, and counting both would train them twice (I2).
            if step >= self._step and self._claims.accepts(version, part.claim):
                self._policy.measured("generate", part.claim.rank, part.seconds)
                if self._board(step).add(part):
                    self._ledger.issue(part)
                    self._claims.received(version, part.claim.position)
        return True

    def _board(self, step: int) -> StepBoard:
        if step not in self._boards:
            self._boards[step] = self._new_board(step)
        return self._boards[step]


class FragmentStream:
    """Complete, scored fragments as micro-batches, in the order that the schedule fixes.

    Args:
        spec: the schedule.
        micro_batches: micro-batches of one update, equal on every trainer rank.
        state: counters of this trainer, of which `version` is the RL step in progress.
    """

    def __init__(
        self,
        spec: ScheduleSpec,
        micro_batches: int,
        state: TrainerState,
        inbox: Inbox,
        source: FragmentSource,
        ledger: StepLedger,
        stop_vote: StopVote,
    ) -> None:
        self._spec, self._micro_batches, self._state = spec, micro_batches, state
        self._inbox, self._source, self._ledger, self._stop_vote = inbox, source, ledger, stop_vote

    def __len__(self) -> int:
        return self._micro_batches * self._spec.updates_per_batch

    def __iter__(self) -> Iterator[TrainBatch]:
        board = self._inbox.open(self._state.version)
        self._ledger.open(self._source.predicted_end(board.step))
        for update in range(self._spec.updates_per_batch):
            # A replica does not wait for what others train while something of its own is ready.
            pending = sorted(
                fragments(self._spec, update), key=lambda fragment: not board.concerns(fragment)
            )
            while pending:
                fragment = self._source.next_fragment(board, update, pending)
                pending.remove(fragment)
                self._ledger.begin_fragment(board, fragment)
                for batch in board.batches(fragment, last=not pending):
                    self._stop_vote.begin_micro_batch()
                    yield batch
                self._ledger.end_fragment()
