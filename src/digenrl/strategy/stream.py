"""The fragment stream of a trainer rank: what the Strategy gives Lightning in place of the train dataloader.

It is *sized*: an unsized loader makes Lightning fetch the next batch's first fragment before the optimizer step, which
on-policy never comes. One Lightning epoch is one RL step, so `len` is the number of micro-batches of one logical batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from digenrl.schedule import Task, fragments
from digenrl.strategy.cells import Part, StepBoard
from digenrl.strategy.wire import Kind
from digenrl.types import TrainBatch

if TYPE_CHECKING:
    from digenrl.strategy.disaggregated import DisaggregatedStrategy


class FragmentStream:
    """Complete, scored fragments as micro-batches, in the order that the schedule fixes; waits and lends in between."""

    def __init__(self, strategy: DisaggregatedStrategy) -> None:
        self._strategy = strategy
        self._boards: dict[int, StepBoard] = {}

    def __len__(self) -> int:
        return self._strategy.micro_batches_per_update * self._strategy.spec.updates_per_batch

    def __iter__(self) -> Iterator[TrainBatch]:
        strategy = self._strategy
        step = strategy.version
        board = self._board(step)
        for update in range(strategy.spec.updates_per_batch):
            pending = list(fragments(strategy.spec, update))
            while pending:
                fragment = self._wait(board, pending)
                pending.remove(fragment)
                strategy.trained(board, fragment)
                began = strategy.spans.now()
                strategy.spans.announce(f"train g{fragment[0]}")
                yield from board.batches(fragment)
                ended = strategy.spans.now()
                strategy.spans.add("train", began, ended, step=step, group=fragment[0], groups=len(fragment))
                strategy.lender.measured("train", strategy.world.rank, ended - began)
        del self._boards[step]

    def _board(self, step: int) -> StepBoard:
        if step not in self._boards:
            strategy = self._strategy
            weights = strategy.engine.reward_weights
            self._boards[step] = StepBoard(strategy.spec, strategy.place_timesteps, strategy.world.rank, step, weights)
        return self._boards[step]

    def _wait(self, board: StepBoard, pending: list[tuple[int, ...]]) -> tuple[int, ...]:
        """The next fragment; everything that a trainer does in a bubble happens here."""
        strategy = self._strategy
        spans = strategy.spans
        waiting_since: float | None = None
        first = len(pending) == len(fragments(strategy.spec, 0)) and strategy.updates_done == 0

        def end_wait() -> None:
            nonlocal waiting_since
            if waiting_since is not None:
                cause = "first_fragment" if first else "tail"
                spans.add("wait", waiting_since, spans.now(), cause=cause, step=board.step)
                waiting_since = None

        while True:
            while self._receive(0.0):
                pass
            fragment = strategy.cut_fragment(pending, board)
            if fragment is not None:
                end_wait()
                return fragment
            if strategy.may_lend and (task := strategy.lend(board, pending)) is not None:
                end_wait()
                self._lend(board, pending, task)
                continue
            if waiting_since is None:
                waiting_since = spans.now()
                strategy.show("wait fragment")
            self._receive(0.2)
            strategy.control.check()

    def _lend(self, board: StepBoard, pending: list[tuple[int, ...]], task: Task) -> None:
        """Run one rollout task here; with hand-off it is passed on as soon as a fragment is ready."""
        strategy = self._strategy
        colocated = strategy.world.rollouts == 0

        def interrupt(task: Task, steps_left: int) -> int | None:
            while self._receive(0.0):
                pass
            return strategy.heir(board, pending, task)

        with strategy.lightning_module.rollout_weights():  # type: ignore[union-attr]
            strategy.runner.run(
                task,
                "generate" if colocated else "lend",
                interrupt if strategy.spec.handoff and not colocated else None,
            )

    def _receive(self, timeout: float) -> bool:
        """Take one message if there is one within `timeout` seconds."""
        message = self._strategy.link.receive(timeout)
        if message is None:
            return False
        if message.kind is Kind.CELLS:
            part = Part(message)
            self._strategy.lender.measured("generate", part.maker, part.seconds)
            if part.meta["step"] >= self._strategy.version:  # older: a re-issued task that came twice
                self._board(part.meta["step"]).add(part)
        return True
