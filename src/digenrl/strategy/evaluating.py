"""Evaluation on rollouts, while trainers go on.

    trainers   open the evaluation of version V as soon as V is published, and train
    rollouts   run V's tasks; then they take V's pieces, one at a time, and send each to trainer 0
    trainers   wait for the pieces before their next update: no rollout can leave V before V's evaluation is complete

A piece depends on the weights and its number alone (`digenrl.rollout.evaluation`), so any rank may
draw a piece, even two ranks. Another rollout takes the piece of a rank that is lost. The trainers
draw a piece that two rollouts were lost with, and all pieces when no rollout is left. Trainers meet
before the update, so all of them still hold V.

An evaluation may be of other weights than V's: a moving average, or weights that an algorithm
trains but does not sample with. Trainers publish these as version -1 - V, and a rollout exchanges
them with V's while it makes a piece.

On the control store:
    evaluation               "version pieces digest" of the open evaluation; no digest: of V's own weights
    evaluation/v{V}          the counter: one atomic add takes the next piece
    evaluation/v{V}/{piece}  "rank attempt" of the piece's owner, changed by compare-and-set; "": received
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from digenrl.cluster.control import Control
from digenrl.cluster.world import World
from digenrl.record.span_log import SpanLog
from digenrl.rollout.engine import RolloutEngine
from digenrl.rollout.evaluation import FixedSamples, Piece, ReferenceSamples
from digenrl.schedule.claims import MAX_ATTEMPTS
from digenrl.strategy.step_ledger import StepLedger
from digenrl.strategy.stop_vote import StopVote
from digenrl.transport.weights import Version, exchanged
from digenrl.transport.wire import Message, MessageKind

_OPEN = "evaluation"
_POLL_S = 0.2
"""Longest wait for a message before trainer 0 looks at everything again."""


def evaluation_version(version: int) -> int:
    """Return the version number under which the weights for evaluating `version` are published, if
    they differ from the policy's (for example a moving average). A negative number never collides
    with a training version."""
    return -1 - version


def _counter(version: int) -> str:
    return f"{_OPEN}/v{version}"


def _owner_keys(version: int, pieces: Iterable[int]) -> list[str]:
    return [f"{_counter(version)}/{piece}" for piece in pieces]


class EvaluationWorker:
    """A rollout rank's part in evaluations: taking pieces, and making them.

    Args:
        drawn: samples of every evaluation. None: rollouts evaluate nothing.
    """

    def __init__(
        self, drawn: FixedSamples | None, engine: RolloutEngine, control: Control, rank: int
    ) -> None:
        self._drawn, self._engine, self._control, self._rank = drawn, engine, control, rank
        self._reference_samples = ReferenceSamples()
        self._looked = -1
        """Version at whose evaluation the reference samples were last scored."""
        self._weights: Version | None = None
        """Weights received for the open evaluation, or None."""
        self._wanted = ""
        """Digest of the weights that the open evaluation needs. "": the version's own weights."""
        self.away = False
        """Whether the engine holds an evaluation's weights instead of the version's own."""

    def hold(self, weights: Version) -> None:
        """Keep weights that were published for an evaluation, and drop those of the evaluation
        before."""
        self._weights = weights

    def adopted(self, version: int) -> None:
        """Drop the weights of evaluations before `version`, which this rank has adopted."""
        if self._weights is not None and self._weights.number > evaluation_version(version):
            self._weights = None

    def take(self, version: int) -> int | None:
        """Return the number of a piece of the evaluation of `version` for this rank, or None if
        there is none."""
        if self._drawn is None or not (opened := self._control.get(_OPEN)):
            return None
        number, pieces, *wanted = opened.split()
        if int(number) != version:
            return None
        self._wanted, count = "".join(wanted), int(pieces)
        if self._wanted and (self._weights is None or self._weights.digest != self._wanted):
            return None  # the weights are on their way; a rank that joined meanwhile gets none
        while self._control.add(_counter(version), 0) < count:
            piece = self._control.add(_counter(version), 1) - 1
            if piece < count and self._own(version, piece, "0 0", 1):
                return piece
        lost = self._control.lost_ranks()
        owners = self._control.get_all(_owner_keys(version, range(count))) if lost else []
        for piece, owner in enumerate(owners):
            if not owner:
                continue
            rank, attempt = (int(word) for word in owner.split())
            # Attempt 0: counted but never owned. The rank that counted it died in between, or loses
            # the exchange below.
            free = attempt == 0 or (rank in lost and attempt < MAX_ATTEMPTS)
            if free and self._own(version, piece, owner, attempt + 1):
                return piece
        return None

    def _own(self, version: int, piece: int, before: str, attempt: int) -> bool:
        (key,) = _owner_keys(version, [piece])
        return self._control.compare_set(key, before, f"{self._rank} {attempt}")

    def make(self, version: int, number: int, before_step: Callable[[], None]) -> Message:
        """Make a piece, and return the message for trainer 0."""
        assert self._drawn is not None, "a piece was taken"
        with self._in_use():
            pictures = self._drawn.draw(self._engine, [number], before_step)
        looked = (
            {} if self._looked == version else self._reference_samples.look(pictures, self._engine)
        )
        self._looked = version
        return Message(
            MessageKind.EVALUATION,
            {"version": version, "piece": number},
            Piece(pictures, looked).tensors(),
        )

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Inside, the engine holds the weights of the open evaluation."""
        if not self._wanted:
            yield
            return
        assert self._weights is not None, "a piece was taken"
        self.away = True
        try:
            with exchanged(self._engine.policy.trained_parameters(), self._weights):
                yield
        finally:
            self.away = False


class Evaluations:
    """The trainers' part: opening an evaluation, and waiting for its pieces before the next update.

    Args:
        drawn: samples that rollouts draw. None: trainers evaluate by themselves.
        receive: `Inbox.receive`.
        agree: `Agreement.choose`.
        publish: `Publisher.publish_evaluated`.
    """

    def __init__(
        self,
        drawn: FixedSamples | None,
        world: World,
        control: Control,
        stop_vote: StopVote,
        spans: SpanLog,
        ledger: StepLedger,
        receive: Callable[[float], bool],
        agree: Callable[[int], int],
        publish: Callable[[int], str],
    ) -> None:
        self._drawn, self._world, self._control, self._stop_vote = drawn, world, control, stop_vote
        self._spans, self._ledger, self._receive, self._agree = spans, ledger, receive, agree
        self._publish = publish
        self._version = -1
        self._makers: list[int] | None = None
        """Rollouts that were sent the weights of the open evaluation. None: every rollout holds
        them."""
        self._arrived: dict[int, Piece] = {}
        """Pieces that trainer 0 has received."""

    @property
    def on_rollouts(self) -> bool:
        """Whether rollouts evaluate."""
        return self._drawn is not None

    def open(self, version: int) -> None:
        """Let rollouts evaluate `version`, which is published."""
        assert self._drawn is not None
        self._version, self._arrived = version, {}
        there = self._control.survivors(self._world.rollout_ranks)
        digest = self._publish(version)
        self._makers = there if digest else None
        if self._world.rank == 0:
            for key in self._keys():
                self._control.set(key, "0 0")
            self._control.set(_OPEN, f"{version} {len(self._drawn.prompts)} {digest}")

    def add(self, message: Message) -> None:
        """Take a piece."""
        assert self._drawn is not None
        number = int(message.meta["piece"])
        if message.meta["version"] == self._version:
            self._arrived[number] = Piece.of(message.tensors, self._drawn.prompts[number])
            self._control.set(self._keys()[number], "")

    def finish(self, then: Callable[[Mapping[int, Piece], Sequence[int]], None]) -> None:
        """Wait for the open evaluation. Every trainer calls this at the same place, before the
        weights change. The wait counts neither as training nor as the step's time.

        Args:
            then: called with the pieces that arrived (on trainer 0) and the numbers of those that
                trainers must make.

        Raises:
            StepGivenUp: the step in progress ends instead.
        """
        with self._ledger.paused():
            with self._spans.span("wait", cause="evaluation", step=self._version):
                # Trainer 0 alone waits for messages. The others poll for its grant, outside any
                # collective: a long wait in a collective would run into its limit.
                missing = self._missing() if self._world.rank == 0 else []
                self._stop_vote.begin()
                together = self._agree(sum(1 << number for number in missing))
            then(
                self._arrived,
                [number for number in range(together.bit_length()) if together >> number & 1],
            )
        if self._world.rank == 0:
            for key in (_OPEN, _counter(self._version), *self._keys()):
                self._control.delete(key)
        self._version, self._arrived = -1, {}

    def _keys(self) -> list[str]:
        assert self._drawn is not None
        return _owner_keys(self._version, range(len(self._drawn.prompts)))

    def _missing(self) -> list[int]:
        """Wait for all pieces that rollouts make. Return the numbers of the others."""
        assert self._drawn is not None
        every = range(len(self._drawn.prompts))
        while left := [number for number in every if number not in self._arrived]:
            if self._without_maker(left) == left:
                break
            self._control.check()
            self._stop_vote.check()
            self._receive(_POLL_S)
        return left

    def _without_maker(self, pieces: Sequence[int]) -> list[int]:
        """Return the `pieces` that no rollout will make: none is there, or `MAX_ATTEMPTS` owners
        were lost."""
        there = self._control.survivors(self._world.rollout_ranks)
        if not (there if self._makers is None else set(there).intersection(self._makers)):
            return list(pieces)
        if not (lost := self._control.lost_ranks()):
            return []
        owners = self._control.get_all(_owner_keys(self._version, pieces))
        ends = {f"{rank} {MAX_ATTEMPTS}" for rank in lost}
        return [piece for piece, owner in zip(pieces, owners, strict=True) if owner in ends]
