"""What arrives on a trainer rank, sorted into one board per RL step."""

from __future__ import annotations

from collections.abc import Callable

from digenrl.schedule.claims import Claims
from digenrl.schedule.scheduler import Scheduler
from digenrl.strategy.step_ledger import StepLedger
from digenrl.transport.cells import Part, StepBoard
from digenrl.transport.link import Link
from digenrl.transport.wire import Message, MessageKind


class Inbox:
    """Sorts what arrives on a trainer rank into the boards of the RL steps.

    Args:
        new_board: RL step -> an empty board.
    """

    def __init__(
        self,
        link: Link,
        claims: Claims,
        scheduler: Scheduler,
        ledger: StepLedger,
        new_board: Callable[[int], StepBoard],
    ) -> None:
        self._link, self._claims, self._scheduler, self._ledger = link, claims, scheduler, ledger
        self._new_board = new_board
        self._handlers: dict[MessageKind, Callable[[Message], None]] = {}
        self._boards: dict[int, StepBoard] = {}
        self._step = 0

    def set_handler(self, kind: MessageKind, handler: Callable[[Message], None]) -> None:
        """Give messages of `kind`, which are no cells, to `handler`."""
        self._handlers[kind] = handler

    def open_board(self, step: int) -> StepBoard:
        """Return the board of RL step `step`, which is in progress, and forget those of earlier
        steps."""
        self._step = step
        self._boards = {number: board for number, board in self._boards.items() if number >= step}
        return self._board_of(step)

    def receive_message(self, timeout: float) -> bool:
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
            if step >= self._step and self._claims.accepts_result(version, part.claim):
                self._scheduler.measured("generate", part.claim.rank, part.seconds)
                # False for a second delivery: the same samples, which are not counted again.
                if self._board_of(step).add_part(part):
                    self._ledger.count_issued(part)
                    self._claims.mark_received(version, part.claim.position)
        return True

    def _board_of(self, step: int) -> StepBoard:
        if step not in self._boards:
            self._boards[step] = self._new_board(step)
        return self._boards[step]
