"""Evaluation on rollouts, while trainers go on.

    trainers   open the evaluation of version V as soon as V is published, and train
    rollouts   run V's tasks; then they claim V's pieces, one at a time, and send each to trainer 0
    trainers   wait for the pieces before their next update: no rollout can leave V before V's evaluation is complete

Pieces are claimed as tasks are, from a queue of their own (`digenrl.schedule.claims`). A piece
depends on the weights and its number alone (`digenrl.rollout.evaluation`), so any rank may draw it,
even two ranks. When no rollout is left, the trainers draw all pieces. Trainers meet before the
update, so version V is still on each of them.

An evaluation may be of other weights than V's: a moving average, or weights that an algorithm
trains but does not sample with. Trainers publish these under the queue's number, and a rollout
exchanges them with V's while it makes a piece. The store's key `evaluation` is "version:digest" of
the open evaluation; no digest means V's own weights.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from digenrl.rollout.engine import Pictures, RolloutEngine
from digenrl.rollout.evaluation import NOISY_PIECES, FixedSamples, pictures_of, tensors_of
from digenrl.schedule.claims import Claim, Claims, evaluation_pieces, evaluation_queue
from digenrl.strategy.setup import RankRuntime
from digenrl.strategy.step_ledger import StepLedger
from digenrl.strategy.stop_vote import StopVote
from digenrl.strategy.tasks import TaskRunner
from digenrl.transport.weights import Version, exchanged_values
from digenrl.transport.wire import Message, MessageKind

_OPEN = "evaluation"
_POLL_S = 0.2
"""Longest wait for a message before trainer 0 looks at everything again."""


class _Leaving(Exception):
    """Raised when this rank leaves in the middle of a piece."""


class EvaluationWorker:
    """A rollout rank's part in evaluations: claiming pieces, and making them.

    Args:
        drawn: samples of every evaluation. None: rollouts evaluate nothing.
    """

    def __init__(
        self, drawn: FixedSamples | None, runtime: RankRuntime, runner: TaskRunner
    ) -> None:
        self._drawn, self._runner, self._claims = drawn, runner, runner.claims
        self._engine: RolloutEngine = runtime.setup.engine
        self._leave, self._control = runtime.setup.session.leave, runtime.control
        self._link, self._spans = runtime.link, runtime.spans
        self._weights: Version | None = None
        """Weights received for the open evaluation, or None."""
        self._wanted = ""
        """Digest of the weights that the open evaluation needs. "": the version's own weights."""

    def hold_weights(self, weights: Version) -> None:
        """Keep weights that were published for an evaluation, and drop those of the evaluation
        before."""
        self._weights = weights

    def drop_old_weights(self, version: int) -> None:
        """Drop the weights of evaluations before `version`, which this rank has adopted."""
        if self._weights is not None and self._weights.number > evaluation_queue(version):
            self._weights = None

    def claim_piece(self, version: int) -> Claim | None:
        """Claim the next piece of the evaluation of `version`; None if there is none for this
        rank."""
        if self._drawn is None or not (opened := self._control.get(_OPEN)):
            return None
        # "12:" is version 12 with its own weights, "12:<digest>" with others.
        number, self._wanted = opened.split(":")
        if int(number) != version:
            return None
        if self._wanted and (self._weights is None or self._weights.digest != self._wanted):
            return None  # the weights are on their way; a rank that joined meanwhile gets none
        pieces = evaluation_pieces(version, len(self._drawn.pieces))
        return self._claims.take_next_task(evaluation_queue(version), pieces, range(len(pieces)))

    def make_piece(self, version: int, claim: Claim, receive: Callable[[], None]) -> None:
        """Make a claimed piece and send it to trainer 0. If this rank must leave, the claim is
        released for another rank.

        Args:
            receive: called before each denoising step, to sort what has arrived.
        """
        with self._spans.stage("wait reward"):  # a scorer may not be asked by two threads at once
            self._runner.settle_sends(wait=True)
        try:
            with self._spans.span("eval", step=version, piece=claim.position):
                pictures = self._draw_piece(version, claim.position, receive)
                facts = {"version": version, "piece": claim.position}
                self._link.send(0, Message(MessageKind.EVALUATION, facts, tensors_of(pictures)))
        except _Leaving:
            self._claims.release_claim(evaluation_queue(version), claim)

    def _draw_piece(self, version: int, number: int, receive: Callable[[], None]) -> Pictures:
        """Draw the samples of piece `number` with the weights of the open evaluation.

        Raises:
            _Leaving: this rank leaves.
        """
        assert self._drawn is not None, "a piece was claimed"

        def before_step() -> None:
            self._spans.progress.mark_progress()
            self._control.check_abort()
            receive()
            if self._leave.is_set():
                raise _Leaving

        with self._in_use():
            noise = version == 0 and number < NOISY_PIECES
            return self._drawn.draw_pieces(self._engine, [number], before_step, noise)

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Give the engine the weights of the open evaluation during the body."""
        if not self._wanted:
            yield
            return
        assert self._weights is not None, "a piece was claimed"
        with exchanged_values(
            self._engine.policy.adapter.trained_parameters(), self._weights.tensors
        ):
            yield


class Evaluations:
    """The trainers' part: opening an evaluation, and waiting for its pieces before the next update.

    Args:
        receive: `Inbox.receive_message`.
        agree: `Agreement.agree_on_choice`.
        publish: `Publisher.publish_evaluated`.
    """

    def __init__(
        self,
        runtime: RankRuntime,
        claims: Claims,
        stop_vote: StopVote,
        ledger: StepLedger,
        receive: Callable[[float], bool],
        agree: Callable[[int], int],
        publish: Callable[[int], str],
    ) -> None:
        self._drawn, self._world = runtime.setup.evaluated, runtime.setup.world
        self._control, self._spans = runtime.control, runtime.spans
        self._claims, self._stop_vote, self._ledger = claims, stop_vote, ledger
        self._receive, self._agree, self._publish = receive, agree, publish
        self._version = -1
        self._makers: list[int] | None = None
        """Rollouts that were sent the weights of the open evaluation. None: every rollout holds
        them."""
        self._arrived: dict[int, Pictures] = {}
        """Pieces that trainer 0 has received."""

    @property
    def on_rollouts(self) -> bool:
        """Whether rollouts evaluate."""
        return self._drawn is not None

    def open_evaluation(self, version: int) -> None:
        """Let rollouts evaluate `version`, which is the newest published one."""
        self._version, self._arrived = version, {}
        # Before the publication: a rank that joins meanwhile may lack the weights, and is not
        # waited for.
        there = self._control.surviving_ranks(self._world.rollout_ranks)
        digest = self._publish(version)
        self._makers = there if digest else None
        if self._world.rank == 0:
            self._control.set(_OPEN, f"{version}:{digest}")

    def add_piece(self, message: Message) -> None:
        """Take a piece."""
        assert self._drawn is not None
        number = int(message.meta["piece"])
        # Two ranks may have made one piece; the first counts, and both are alike.
        if message.meta["version"] == self._version and number not in self._arrived:
            self._arrived[number] = pictures_of(message.tensors, self._drawn.pieces[number])
            # From here on the piece is done, whatever becomes of the rank that made it.
            queue = evaluation_queue(self._version)
            self._claims.mark_received(queue, number, self._world.trainers)

    def finish_evaluation(self, then: Callable[[Mapping[int, Pictures] | None], None]) -> None:
        """Wait for the open evaluation. Every trainer calls this at the same place, before the
        weights change. The wait counts neither as training nor as the step's time.

        Args:
            then: called with the pieces (on trainer 0), or with None if trainers must make them
                all.

        Raises:
            StepGivenUp: the step in progress ends instead.
        """
        with self._ledger.clock_paused():
            with self._spans.span("wait", cause="evaluation", step=self._version):
                # Trainer 0 alone waits for messages. The others poll for its grant, outside any
                # collective: a long wait in a collective would run into its limit.
                complete = self._world.rank == 0 and self._wait_for_pieces()
                self._stop_vote.begin_piece()
                complete = bool(self._agree(int(complete)))
            then(self._arrived if complete else None)
        if self._world.rank == 0:
            self._control.delete(_OPEN)
        self._version, self._arrived = -1, {}

    def _wait_for_pieces(self) -> bool:
        """Wait for the pieces, and return whether all have arrived. False: no rollout that could
        make the others is left."""
        assert self._drawn is not None
        while len(self._arrived) < len(self._drawn.pieces):
            there = self._control.surviving_ranks(self._world.rollout_ranks)
            # Pieces that have not arrived would come from nobody: the trainers make them.
            if not (there if self._makers is None else set(there).intersection(self._makers)):
                return False
            self._stop_vote.check_for_stop()
            self._receive(_POLL_S)
        return True
