"""Pieces of a step begin together, or a step is given up at one place: two trainers on a real store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from digenrl.cluster.control import Aborted, Control
from digenrl.cluster.world import World
from digenrl.record.progress import Progress
from digenrl.strategy import stop_vote
from digenrl.strategy.stop_vote import StopVote
from digenrl.types import StepGivenUp
from tests.cluster.test_claims import Store


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.close()


class Trainer:
    """One of two trainers; each call runs in a thread of its own."""

    def __init__(self, control: Control, rank: int, sharded: bool) -> None:
        self.control, self.progress, self.droppable = control, Progress(), True
        self.vote = StopVote(
            control, World(rank, 2, 1), self.progress, sharded, lambda: self.droppable
        )

    def call(self, what: Callable[[], object]) -> Callable[[], type | None]:
        """Return what waits for the end of `what`, and returns the class of its error."""
        raised: list[type] = []

        def run() -> None:
            try:
                what()
            except (StepGivenUp, Aborted) as error:
                raised.append(type(error))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()

        def end() -> type | None:
            thread.join(timeout=5.0)
            assert not thread.is_alive(), "it waits for ever"
            return raised[0] if raised else None

        return end


def two(store: Store, sharded: bool) -> list[Trainer]:
    return [Trainer(control, rank, sharded) for rank, control in enumerate(store.controls(2)[1])]


@pytest.mark.parametrize("sharded", [False, True], ids=["replicas", "sharded"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_piece_begins_when_all_have_come_to_it(store: Store, sharded: bool, first: int) -> None:
    trainers = two(store, sharded)
    begin = "begin_micro_batch" if sharded else "begin_update"
    for _ in range(2):
        waiting = threading.Event()
        early, late = trainers[first].vote, trainers[1 - first].vote
        ended = trainers[first].call(lambda: (getattr(early, begin)(), waiting.set()))  # noqa: B023
        assert not waiting.wait(0.05), "it has begun alone"
        (its,) = [
            stretch for stretch in trainers[first].progress.current_stretches() if stretch.stage
        ]
        assert its.waits, "it is not to blame when the other hangs"
        late_ended = trainers[1 - first].call(getattr(late, begin))
        assert (ended(), late_ended()) == (None, None)


@pytest.mark.parametrize("sharded", [False, True], ids=["replicas", "sharded"])
def test_a_step_that_one_trainer_cannot_go_on_with_is_given_up_by_all(
    store: Store, sharded: bool
) -> None:
    """The last rollout died when it had sent its result to trainer 0 alone (seed 61207 of the storm).
    Trainer 1 would wait for it for ever, and trainer 0 for trainer 1 in a collective."""
    trainers = two(store, sharded)
    vote = trainers[0].vote
    ended = trainers[0].call(vote.begin_micro_batch if sharded else vote.begin_update)
    trainers[0].control.set("give_up", "1")
    assert ended() is StepGivenUp
    with pytest.raises(StepGivenUp):
        trainers[1].vote.check_for_stop()


def test_a_loan_looks_at_the_store_at_most_every_twentieth_of_a_second(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    vote = StopVote(store.controls(1)[1][0], World(0, 1, 1), Progress(), False, lambda: True)
    now, looked = [0.0], list[float]()
    monkeypatch.setattr(stop_vote.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(vote, "check_for_stop", lambda: looked.append(now[0]))
    for now[0] in (10.0, 10.03, 10.06, 10.1, 10.12):
        vote.between_steps()
    assert looked == [10.0, 10.06, 10.12]


def test_the_longer_others_are_waited_for_the_seldomer_it_is_looked(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A twentieth of the wait so far, between a millisecond and a twentieth of a second."""
    vote = StopVote(store.controls(2)[1][0], World(0, 2, 0), Progress(), False, lambda: True)
    waited, paused = iter([100.0, 100.0, 100.1, 100.5, 110.0]), list[float]()
    monkeypatch.setattr(stop_vote.time, "monotonic", lambda: next(waited))

    def pause(seconds: float) -> None:
        paused.append(seconds)
        if len(paused) == 4:
            vote._control.add("arrived", 1)

    vote.begin_piece(pause)
    assert paused == pytest.approx([0.001, 0.005, 0.025, 0.05])
    assert vote._control.get("granted") == "1"
