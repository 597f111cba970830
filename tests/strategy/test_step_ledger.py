"""What arrives on a trainer, and what it trains of that. The step ledger checks I9 and I10 by the
pure schedule while the run goes on."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from digenrl.cluster.world import World
from digenrl.record.progress import Progress
from digenrl.record.span_log import SpanLog
from digenrl.schedule import ScheduleSpec, group_tasks, version_queue
from digenrl.schedule.claims import Claim, Claims, MemoryClaims
from digenrl.schedule.ranks import Roles
from digenrl.schedule.scheduler import Scheduler
from digenrl.schedule.search import Decision
from digenrl.schedule.staleness import AccountingError, StalenessError
from digenrl.schedule.timesteps import Block
from digenrl.strategy.inbox import Inbox
from digenrl.strategy.shared import TrainerState
from digenrl.strategy.step_ledger import StepLedger
from digenrl.strategy.stop_vote import StopVote
from digenrl.strategy.trainer_step import TrainerStep
from digenrl.transport.cells import StepBoard, owned_positions
from digenrl.transport.wire import Message, MessageKind
from tests.cluster.test_claims import Store
from tests.strategy.test_invariants import SPEC, message, part, placed
from tests.transport.test_weights import Wire

ASYNC = replace(SPEC, async_steps=1, stale_fraction=0.5)


def opened(
    tmp_path: Path, step: int, predicted_end: float | None = None, rank: int = 0
) -> tuple[StepLedger, StepBoard]:
    """Return a ledger of `ASYNC` in step `step`, and the step's board. Both groups are complete,
    and group 1 has no score. The next step's stale group has arrived too."""
    world = World(rank, 1 + rank, 1)
    scheduler = Scheduler(
        ASYNC, Roles(1 + rank, 1), lambda version: version_queue(ASYNC, version, 9)
    )
    spans = SpanLog(None, rank, "trainer", 0.0)
    ticks = itertools.count()
    spans.now = lambda: float(next(ticks))  # type: ignore[method-assign]  # a second at each look
    ledger = StepLedger(ASYNC, world, spans, scheduler, tmp_path)
    ledger.open_step(predicted_end)
    board = StepBoard(ASYNC, placed, 0, step=step, reward_weights={"r": 1.0})
    for task in (*group_tasks(ASYNC, step, 0), *group_tasks(ASYNC, step, 1)):
        arrived = part(task, torch.full((2,), torch.nan) if task.group else None)
        assert board.add_part(arrived)
        ledger.count_issued(arrived)
    for task in group_tasks(ASYNC, step + 1, 0):
        ledger.count_issued(part(task))
    return ledger, board


def test_I10_every_issued_sample_is_trained_dropped_or_in_flight(tmp_path: Path) -> None:
    steps, board = opened(tmp_path, 3)
    assert (steps.ledger.issued, steps.ledger.in_flight) == (12, 12), (
        "two groups of step 3, the stale one of step 4"
    )
    for fragment in ((0,), (1,)):
        steps.begin_fragment(board, fragment)
    steps.end_fragment()
    with steps.clock_paused():
        for _ in range(1000):
            steps._spans.now()
    steps.close_step(version=4)
    assert 5 < steps.facts["step_s"] < 100, "an evaluation is not the step's time"
    ledger = steps.ledger
    assert (ledger.trained, ledger.dropped, ledger.in_flight) == (4, {"missing_reward": 4}, 4)
    event = json.loads((tmp_path / "events.jsonl").read_text())
    assert (event["kind"], event["group"], event["samples"]) == ("dropped", 1, 4)
    assert steps.facts["staleness_max"] == 1


def test_a_closed_step_says_what_was_trained_and_how_long_it_took(tmp_path: Path) -> None:
    """Steps of 8 samples with 3 trained time steps; every look at the clock takes a second."""
    steps, board = opened(tmp_path, 3, predicted_end=7.5)
    spans, scheduler = steps._spans, steps._scheduler
    spans.add_span("wait", 1.0, 3.5, cause="tail")
    spans.add_span("wait", 4.0, 5.0, cause="straggler")
    steps.begin_fragment(board, (0,))
    steps.begin_fragment(board, (1,))
    steps.end_fragment()
    cell_s = scheduler._costs["train", 0]
    assert cell_s == pytest.approx(1.0 / 6), "a second for the 2 tasks of a group, 3 steps each"
    before = spans.now()
    with steps.clock_paused():
        spans.now()
    steps.close_step(version=4)
    # The clock began at 0, which is when the step began; the pause took two looks' distance.
    seconds = before + 4 - 2
    counts = {"samples": 8, "cells_trained": 12, "cells_skipped": 12, "groups_trained": 1}
    left = {"groups_missing_reward": 1, "groups_zero_variance": 0, "groups_surplus": 0}
    assert steps.facts == {
        **counts,
        **left,
        "step_s": seconds,
        "samples_per_s": 8 / seconds,
        "staleness_max": 1,
        "missing/r": 4,
        "missing/logged": 8,
        "bubble/tail": 2.5,
        "bubble/straggler": 1.0,
        "predicted_step_s": 7.5,
    }
    began = spans.now() + 1
    steps.open_step(None)
    for fragment in ((0,), (1,)):
        for task in group_tasks(ASYNC, 4, fragment[0])[: 2 * fragment[0]]:
            steps.count_issued(part(task))
        steps.begin_fragment(complete(4), fragment)
    steps.end_fragment()
    end = spans.now() + 1
    steps.close_step(version=5)
    assert steps.facts["step_s"] == end - began
    assert steps.facts["cells_trained"] == 24
    assert not {"predicted_step_s", "bubble/tail"} & steps.facts.keys(), "of the step before"
    assert [steps.facts[name] for name in (*left, "missing/r")] == [0] * 4


def complete(step: int) -> StepBoard:
    """The board of a step whose groups are all there and scored."""
    board = StepBoard(ASYNC, placed, 0, step=step, reward_weights={"r": 1.0})
    for task in (*group_tasks(ASYNC, step, 0), *group_tasks(ASYNC, step, 1)):
        board.add_part(part(task))
    return board


def test_a_step_without_older_weights_says_so_and_tells_the_policy_when_it_began(
    tmp_path: Path,
) -> None:
    scheduler = Scheduler(SPEC, Roles(1, 1), lambda version: version_queue(SPEC, version, 9))
    begun: list[int] = []
    scheduler.step_begun = begun.append  # type: ignore[method-assign]
    spans = SpanLog(None, 0, "trainer", 0.0)
    ledger = StepLedger(SPEC, World(0, 1, 1), spans, scheduler, tmp_path)
    for step in (3, 4):
        board = StepBoard(SPEC, placed, 0, step=step, reward_weights={"r": 1.0})
        ledger.open_step(None)
        for task in (*group_tasks(SPEC, step, 0), *group_tasks(SPEC, step, 1)):
            board.add_part(arrived := part(task))
            ledger.count_issued(arrived)
        for fragment in ((0,), (1,)):
            ledger.begin_fragment(board, fragment)
        ledger.end_fragment()
        ledger.close_step(step + 1)
        assert (ledger.facts["staleness_max"], ledger.facts["cells_trained"]) == (0, 24)
    assert begun == [0, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_trainer_0_notes_what_a_loan_promised_and_that_lending_is_off(
    tmp_path: Path, rank: int
) -> None:
    steps, _ = opened(tmp_path, 3, rank=rank)
    steps.ledger.open.clear()
    steps.ledger.issued = 0
    for version in (1, 2, 3):
        steps._scheduler._trainers[rank].prediction = Decision(2, 0.25, 0.5), steps._spans.now()
        steps.close_step(version)
    if rank:
        assert not (tmp_path / "events.jsonl").exists()
        return
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events] == ["lend"] * 3 + ["tag_off"]
    facts = {"rounds": 2, "predicted_s": 0.25, "predicted_without_s": 0.5, "measured_s": 1}
    assert events[2] | facts | {"rl_step": 3} == events[2]
    assert "switched itself off" in events[3]["message"]


def test_I10_a_group_that_never_came_to_the_loss_raises(tmp_path: Path) -> None:
    steps, board = opened(tmp_path, 3)
    steps.begin_fragment(board, (0,))
    steps.end_fragment()
    with pytest.raises(
        AccountingError, match="group 1 of step 3 was issued, but neither trained nor dropped"
    ):
        steps.close_step(version=4)
    steps.begin_fragment(board, (0,))
    with pytest.raises(
        AccountingError, match=r"group 0 of step 3 was trained, but it is not in flight"
    ):
        steps.end_fragment()


def test_I9_a_fragment_of_weights_that_are_too_old_raises(tmp_path: Path) -> None:
    steps, board = opened(tmp_path, 3)
    old = part(group_tasks(ASYNC, 3, 0)[0])
    old.meta["version"] = 1
    board._parts[0, 0] = old
    with pytest.raises(
        StalenessError, match="generated by version 1 reached the trainer at version 3"
    ):
        steps.begin_fragment(board, (0,))


@pytest.mark.parametrize(("treatment", "factor"), [("drop", 3 / 2), ("keep", 1.0)])
def test_groups_that_leave_the_denominator_scale_the_gradient_by_those_that_are_left(
    treatment: Any, factor: float
) -> None:
    spec = replace(SPEC, prompts=3, zero_variance_groups=treatment)
    board = StepBoard(spec, placed, 0, step=3, reward_weights={"r": 1.0})
    assert board.gradient_scale(0) == 1.0
    board.left_out[1] = "zero_variance"
    assert board.gradient_scale(0) == factor
    board.left_out |= {0: "zero_variance", 2: "zero_variance"}
    assert board.gradient_scale(0) == 1.0, "nothing is trained"


def test_a_sharded_rank_without_cells_gets_the_first_cell_of_each_fragment() -> None:
    def one_rank_trains(fragment: tuple[int, ...]) -> Any:
        return (*placed(fragment), ((),))

    def owned(rank: int, lockstep: bool) -> list[tuple[int, ...]]:
        where = [(group, part) for group in (0, 1) for part in (0, 1)]
        return [owned_positions(SPEC, one_rank_trains, rank, *at, lockstep) for at in where]

    assert owned(1, True) == [(0,), (), (0,), ()]
    assert owned(1, False) == [()] * 4
    assert owned(0, True) == owned(0, False) == [(0, 1, 2)] * 4


def test_a_sharded_rank_without_cells_trains_the_first_cell_at_no_weight(tmp_path: Path) -> None:
    """In the last micro-batch, where gradients are reduced; in no other."""

    def one_rank_trains(fragment: tuple[int, ...]) -> Any:
        return (*placed(fragment), ((),) * len(placed(fragment)[0]))

    board = StepBoard(SPEC, one_rank_trains, 1, 3, {"r": 1.0}, lockstep=True, neighbours=1)
    for task in (*group_tasks(SPEC, 3, 0), *group_tasks(SPEC, 3, 1)):
        board.add_part(part(task))
    for last in (False, True):
        *before, final = board.micro_batches((1,), last)
        assert all(batch.blocks == () or not batch.blocks for batch in before)
        assert len(final.blocks) == last
        for block in final.blocks:
            assert (block.group, block.weight) == (1, 0.0)
            assert len(block.latents) == len(block.next_latents) == 2
    together = StepBoard(SPEC, one_rank_trains, 1, 3, {"r": 1.0}, lockstep=True)
    for task in group_tasks(SPEC, 3, 1):
        together.add_part(part(task))
    assert all(len(batch.blocks) == 1 for batch in together.micro_batches((1,))), (
        "all are neighbours"
    )


def test_neighbours_make_as_many_forwards_as_the_one_with_most_blocks_and_replicas_their_own() -> (
    None
):
    first, second = Block(1, 0, (0, 1)), Block(1, 1, (0,))

    def uneven(fragment: tuple[int, ...]) -> Any:
        return (((first, second), (first, second), ()), ((first,), (), ()))

    counts = {}
    for lockstep in (True, False):
        board = StepBoard(SPEC, uneven, 1, 3, {"r": 1.0}, lockstep=lockstep)
        for task in group_tasks(SPEC, 3, 1):
            board.add_part(part(task))
        for last in (True, False):
            found = board.micro_batches((1,), last)
            counts[lockstep, last] = [[b.weight > 0 for b in batch.blocks] for batch in found]
    assert counts[True, False] == [[True, False], [False, False], []]
    assert counts[True, True] == [[True, False], [False, False], [False]]
    assert counts[False, False] == counts[False, True] == [[True], [], []]


@pytest.mark.parametrize("gap", [0, 1])
def test_a_board_knows_the_claims_and_versions_of_what_is_complete(gap: int) -> None:
    spec = replace(ASYNC, gap=gap)
    board = StepBoard(spec, placed, 0, step=3, reward_weights={"r": 1.0})
    for task in (*group_tasks(spec, 3, 0), *group_tasks(spec, 3, 1)):
        board.add_part(part(task))
    assert [board.fragment_versions((group,)) for group in (0, 1)] == [{2}, {3}]
    own = [(2, Claim(task.index, 1, 0)) for task in group_tasks(spec, 3, 0)]
    fresh = [(3, Claim(task.index, 1, 0)) for task in group_tasks(spec, 3, 1)]
    assert board.made_under((0,)) == (own if gap else own + fresh)


class Given(Wire):
    """A link on which these messages have arrived."""

    def __init__(self, messages: list[Message]) -> None:
        super().__init__()
        self.messages = messages

    def receive(self, timeout: float) -> Message | None:
        return self.messages.pop(0) if self.messages else None


def inbox_of(
    tmp_path: Path, spec: ScheduleSpec, messages: list[Message], place: Any = placed
) -> tuple[Inbox, Claims, Scheduler, StepLedger]:
    scheduler = Scheduler(spec, Roles(1, 1), lambda version: version_queue(spec, version, 9))
    ledger = StepLedger(spec, World(0, 1, 1), SpanLog(None, 0, "trainer", 0.0), scheduler, tmp_path)
    claims = Claims(MemoryClaims(), 1)

    def new_board(step: int) -> StepBoard:
        return StepBoard(spec, place, 0, step=step, reward_weights={"r": 1.0})

    inbox = Inbox(Given(messages), claims, scheduler, ledger, new_board)
    return inbox, claims, scheduler, ledger


def test_of_what_arrives_each_result_counts_once_and_none_of_another_claim_or_an_old_step(
    tmp_path: Path,
) -> None:
    old, own, next_step = (group_tasks(SPEC, step, 0)[0] for step in (2, 3, 4))
    ask, mine = Message(MessageKind.ASK, {"rank": 5}), Claim(0, 1, 0)
    came = [
        message(old, mine),
        message(own, Claim(0, 2, 0)),
        message(own, Claim(0, 1, 1)),
        message(own, mine),
        message(own, mine),
        ask,
        message(next_step, mine),
    ]
    inbox, claims, scheduler, ledger = inbox_of(tmp_path, SPEC, list(came))
    asked: list[Message] = []
    inbox.set_handler(MessageKind.ASK, asked.append)
    for version in (2, 3, 4):
        assert claims.take_next_task(version, version_queue(SPEC, version, 9), range(4)) == Claim(
            0, 1, 0
        )
    board = inbox.open_board(3)
    held = []
    for _ in came:
        assert inbox.receive_message(0.0)
        held.append((len(board._parts), claims.held_by(3, 0, 1), ledger.ledger.issued))
    assert not inbox.receive_message(0.0)
    assert held == [(0, False, 0)] * 3 + [(1, True, 2)] * 3 + [(1, True, 4)]
    assert not claims.held_by(3, 0, 2), "the second delivery counts for nobody"
    assert not claims.held_by(2, 0, 1)
    assert asked == [ask]
    assert scheduler._costs["generate", 1] == 0.1
    assert inbox.open_board(3) is board
    assert len(inbox.open_board(4)._parts) == 1, "what came early is kept"
    assert inbox.open_board(3) is not board, "an old board is not"


class AsTheyCome:
    """A source that gives the fragments which wait, the last first."""

    def __init__(self, step_end: float | None) -> None:
        self.step_end, self.asked = step_end, list[tuple[int, list[tuple[int, ...]]]]()

    def predicted_end(self, step: int) -> float | None:
        return None if self.step_end is None else step + self.step_end

    def wait_for_fragment(
        self, board: StepBoard, update: int, pending: list[tuple[int, ...]]
    ) -> tuple[int, ...]:
        self.asked.append((update, list(pending)))
        return pending[-1]


def streamed(
    spec: ScheduleSpec, inbox: Inbox, source: AsTheyCome, ledger: StepLedger, vote: StopVote
) -> TrainerStep:
    """RL step 3 of a trainer with 6 micro-batches in each update, which trains nothing."""
    unused = cast(Any, None)
    engine = SimpleNamespace(policy=None)
    setup = SimpleNamespace(
        spec=spec,
        world=SimpleNamespace(trainers=1),
        engine=engine,
        micro_batches_per_update=6,
        gradient_share=None,
    )
    runtime = SimpleNamespace(setup=setup, state=TrainerState(version=3), spans=None)
    lending = cast(Any, source)
    return TrainerStep(cast(Any, runtime), inbox, lending, ledger, unused, vote, unused)


def test_a_step_streams_every_fragment_of_every_update_and_leaves_the_ledger_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(SPEC, updates_per_batch=2)
    tasks = [task for group in (0, 1) for task in group_tasks(spec, 3, group)]
    came = [message(task, Claim(number, 1, 0)) for number, task in enumerate(tasks)]
    inbox, claims, _, ledger = inbox_of(tmp_path, spec, came)
    for position in range(4):
        assert claims.take_next_task(3, version_queue(spec, 3, 9), range(4)).position == position
    inbox.open_board(3)
    while inbox.receive_message(0.0):
        pass
    store = Store()
    vote = StopVote(store.controls(1)[1][0], World(0, 1, 1), Progress(), False, lambda: True)
    source = AsTheyCome(10.0)
    asked: list[Any] = []
    plain = StepBoard.micro_batches

    def batches(board: StepBoard, fragment: tuple[int, ...], last: bool) -> Any:
        asked.append((fragment, last))
        return plain(board, fragment, last)

    monkeypatch.setattr(StepBoard, "micro_batches", batches)
    vote.begin_micro_batch = lambda: asked.append("vote")  # type: ignore[method-assign]
    stream = streamed(spec, inbox, source, ledger, vote)
    assert len(stream) == 12, "6 micro-batches of each of 2 updates"
    found = list(stream)
    store.close()
    assert source.asked == [(0, [(0,)]), (1, [(1,)])]
    assert asked == [((0,), True), *["vote"] * 6, ((1,), True), *["vote"] * 6]
    assert [(batch.update, batch.version) for batch in found] == [(0, 3)] * 6 + [(1, 3)] * 6
    assert {block.group for batch in found[:6] for block in batch.blocks} == {0}
    assert ledger.ledger.in_flight == 0
    ledger.close_step(4)
    assert ledger.facts["predicted_step_s"] == 13.0 - ledger._began


def test_a_replica_begins_with_fragments_that_concern_it(tmp_path: Path) -> None:
    def other_ranks_train_the_first(fragment: tuple[int, ...]) -> Any:
        return placed(fragment) if fragment == (1,) else ((),)

    inbox, _, _, ledger = inbox_of(tmp_path, SPEC, [], other_ranks_train_the_first)
    board = inbox.open_board(3)
    for group in (0, 1):
        for task in group_tasks(SPEC, 3, group):
            board.add_part(arrived := part(task))
            ledger.count_issued(arrived)
    store = Store()
    vote = StopVote(store.controls(1)[1][0], World(0, 1, 1), Progress(), False, lambda: True)
    source = AsTheyCome(None)
    stream = streamed(SPEC, inbox, source, ledger, vote)
    assert {block.group for batch in stream for block in batch.blocks} == {1}
    store.close()
    assert source.asked == [(0, [(1,), (0,)]), (0, [(1,)])]
