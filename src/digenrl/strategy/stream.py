"""The fragment stream of a trainer rank: what the Strategy gives Lightning in place of the train dataloader.

    rollout ranks, lending trainers --cells, rewards--> Inbox: one StepBoard per RL step
    FragmentStream: waits for the next complete fragment    (`FragmentSource`: a lending trainer generates meanwhile)
                    -> yields its micro-batches -> Lightning: training_step, backward
    after the last micro-batch of an update: reduction, optimizer step; after the last update: publication,
    which lets rollout ranks begin what waits for the new version

The stream is *sized*: an unsized loader makes Lightning fetch the next batch's first fragment before the optimizer
step, which on-policy never comes. One Lightning epoch is one RL step, so `len` is the number of micro-batches of one
logical batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from digenrl.schedule import ScheduleSpec, fragments
from digenrl.schedule.claims import Claims
from digenrl.schedule.policy import SchedulePolicy
from digenrl.strategy.step_ledger import StepLedger
from digenrl.strategy.stop_vote import StopVote
from digenrl.transport.cells import Part, StepBoard
from digenrl.transport.link import Link
from digenrl.transport.wire import Message, MessageKind
from digenrl.types import CellBlock, TrainBatch


class FragmentSource(Protocol):
    """Where fragments come from: ranks that generate (`lending`), or an extension such as a recorded run."""

    def predicted_end(self, step: int) -> float | None:
        """When RL step `step`, which begins, should end on the run's clock; None: nobody knows."""

    def next_fragment(self, board: StepBoard, update: int, pending: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The fragment of `pending` to train now, as soon as there is one."""


class TrajectoryRecord(Protocol):
    """What is told everything that a trainer trains on. An extension may write it down."""

    def take(self, step: int, message: Message) -> None:
        """Note a message of RL step `step` that counts."""

    def keep_base_means(self, block: CellBlock, means: Tensor) -> None:
        """Note the base model's transition means [b, K, *L] of a block's cells."""

    def finish(self, step: int) -> None:
        """Note that RL step `step` is trained."""

    def close(self) -> None:
        """End the record with the last finished step."""


class NoTrajectoryRecord:
    """A `TrajectoryRecord` that forgets everything."""

    def take(self, step: int, message: Message) -> None:
        """Forget the message."""

    def keep_base_means(self, block: CellBlock, means: Tensor) -> None:
        """Forget the means."""

    def finish(self, step: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Inbox:
    """Sorts what arrives on a trainer rank into the boards of the RL steps.

    Args:
        new_board: RL step -> an empty board.
        serve: sends the present version to a rank that joined.
        keep: is given every message that counts.
        evaluated: is given every piece of an evaluation.
    """

    def __init__(
        self,
        link: Link,
        claims: Claims,
        policy: SchedulePolicy,
        ledger: StepLedger,
        new_board: Callable[[int], StepBoard],
        serve: Callable[[int], None],
        keep: Callable[[int, Message], None] = lambda step, message: None,
        evaluated: Callable[[Message], None] = lambda message: None,
    ) -> None:
        self._evaluated = evaluated
        self._serve = serve
        self._link, self._claims, self._policy, self._ledger = link, claims, policy, ledger
        self._new_board, self._keep = new_board, keep
        self._boards: dict[int, StepBoard] = {}
        self._step = 0

    def open(self, step: int) -> StepBoard:
        """The board of RL step `step`, which begins; those of earlier steps are forgotten."""
        self._step = step
        self._boards = {number: board for number, board in self._boards.items() if number >= step}
        return self._board(step)

    def receive(self, timeout: float) -> bool:
        """Take one message if there is one within `timeout` seconds."""
        message = self._link.receive(timeout)
        if message is None:
            return False
        if message.kind is MessageKind.ASK:
            self._serve(int(message.meta["rank"]))
        if message.kind is MessageKind.EVALUATION:
            self._evaluated(message)
        if message.kind is MessageKind.CELLS:
            part = Part(message)
            step, version = part.meta["step"], part.meta["version"]
            # Refused: a late result of a task that went back when its owner was lost.
            if step >= self._step and self._claims.accepts(version, part.claim):
                self._policy.measured("generate", part.claim.rank, part.seconds)
                if self.add(part):
                    self._claims.received(version, part.claim.position)
                    self._keep(step, message)
        return True

    def add(self, part: Part) -> bool:
        """Put a task's part on its board; whether it was new."""
        new = self._board(part.meta["step"]).add(part)
        if new:
            self._ledger.issue(part)
        return new

    def _board(self, step: int) -> StepBoard:
        if step not in self._boards:
            self._boards[step] = self._new_board(step)
        return self._boards[step]


class FragmentStream:
    """Complete, scored fragments as micro-batches, in the order that the schedule fixes.

    Args:
        spec: the schedule.
        micro_batches: of one update, on every trainer rank.
        step: the RL step in progress.
    """

    def __init__(
        self,
        spec: ScheduleSpec,
        micro_batches: int,
        step: Callable[[], int],
        inbox: Inbox,
        source: FragmentSource,
        ledger: StepLedger,
        stop_vote: StopVote,
    ) -> None:
        self._spec, self._micro_batches, self._step = spec, micro_batches, step
        self._inbox, self._source, self._ledger, self._stop_vote = inbox, source, ledger, stop_vote

    def __len__(self) -> int:
        return self._micro_batches * self._spec.updates_per_batch

    def __iter__(self) -> Iterator[TrainBatch]:
        board = self._inbox.open(self._step())
        self._ledger.open(self._source.predicted_end(board.step))
        for update in range(self._spec.updates_per_batch):
            # A replica does not wait for what others train while something of its own is ready.
            pending = sorted(fragments(self._spec, update), key=lambda fragment: not board.concerns(fragment))
            while pending:
                fragment = self._source.next_fragment(board, update, pending)
                pending.remove(fragment)
                self._ledger.begin_fragment(board, fragment)
                for batch in board.batches(fragment, last=not pending):
                    self._stop_vote.begin_micro_batch()
                    yield batch
                self._ledger.end_fragment()
