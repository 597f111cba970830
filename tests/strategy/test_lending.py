"""A trainer that waits for its fragments: what ends the wait, what it generates meanwhile and with
which weights, and what trainers do together."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from digenrl.cluster.control import Aborted
from digenrl.schedule import ScheduleSpec, next_fragment, place_fragment
from digenrl.schedule.order import later_fragments
from digenrl.schedule.ranks import Roles, Work
from digenrl.strategy.inbox import Inbox
from digenrl.strategy.lending import Lending
from digenrl.strategy.publishing import PublishedCopy
from digenrl.strategy.setup import RankRuntime, RankSetup
from digenrl.strategy.shared import TrainerState
from digenrl.strategy.step_ledger import StepLedger
from digenrl.strategy.stop_vote import Agreement, StopVote
from digenrl.transport.cells import StepBoard
from digenrl.transport.wire import Message
from tests.cluster.test_claims import Store
from tests.strategy.test_rollout_loop import Fed
from tests.strategy.test_tasks import Rollout, run_task

SPEC = ScheduleSpec(
    prompts=2, group_size=2, task_size=1, denoise_steps=3, trained_steps=2, gap=1, tag=True
)


class Loop(Fed):
    """A link on which what trainer `rank` sends to itself comes back."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def send(self, peer: int, message: Message) -> None:
        super().send(peer, message)
        if peer == self.rank:
            self.waiting.append(self.messages()[-1])


class Trainer(Rollout):
    """A trainer between publications, in RL step 0 of version 0."""

    def __init__(
        self,
        store: Store,
        directory: Path,
        spec: ScheduleSpec = SPEC,
        roles: Roles = Roles(1, 1),  # noqa: B008
        rank: int = 0,
    ) -> None:
        self.launcher, self.controls = store.controls(roles.trainers + roles.rollouts)
        self.told: list[dict[str, Any]] = []
        super().__init__(
            self.controls[rank], rank, directory, spec, Loop(rank), roles, self.told.append
        )
        self.link, unused = cast(Loop, self.post), cast(Any, None)
        runner, scheduler, world = self.runner, self.runner.scheduler, self.runner._world
        setup = RankSetup(world, unused, spec, runner._engine, runner._sampler, 1)
        runtime = RankRuntime(
            setup, cast(Any, self), unused, TrainerState(), self.control, self.post, self.spans
        )
        ledger = StepLedger(spec, world, self.spans, scheduler, directory)
        placed = partial(place_fragment, spec, roles.trainers)
        self.ledger = ledger
        self.inbox = Inbox(
            cast(Any, self.link),
            runner.claims,
            scheduler,
            ledger,
            lambda step: StepBoard(
                spec, placed, rank, step, {"bright": 1.0}, lockstep=roles.lockstep
            ),
        )
        self.board = self.inbox.open_board(0)
        self.used: list[str] = []
        network = runner._engine.policy
        self.published = PublishedCopy(network, cast(Any, self), spec, roles.rollouts)
        agreement = Agreement(self.control, world, self.spans.progress)
        vote = StopVote(self.control, world, self.spans.progress, roles.lockstep, lambda: True)
        self.lending = Lending(runtime, runner, self.inbox, self.published, agreement, vote)

    # The hooks, and the algorithm

    def cut_fragment(self, pending: Any, board: StepBoard) -> Any:
        return next_fragment(self.spec, pending, board.completed)

    def on_bubble(self, board: StepBoard, pending: Any) -> int:
        return self.lending.rounds_to_lend(board, pending)

    @contextmanager
    def rollout_weights(self) -> Iterator[None]:
        self.used.append("taken up")
        yield
        self.used.append("put away")

    # What others do

    def made(self, rollout: Rollout, tasks: int = 1) -> None:
        """Let a rollout make tasks of version 0, whose results come here."""
        before = len(rollout.post.to)
        for _ in range(tasks):
            run_task(rollout.runner, rollout.runner.claim_task(0))
        for peer, message in zip(
            rollout.post.to[before:], rollout.post.messages()[before:], strict=True
        ):
            if peer == self.rank:
                self.link.waiting.append(message)

    def decisions(self, name: str) -> list[Any]:
        return [row["args"] for row in self.told if row.get("decision") == name]


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.close()


ALONE = replace(SPEC, tag=False)


def waits(trainer: Rollout) -> list[tuple[Any, ...]]:
    return [(row["cause"], row["step"]) for row in trainer.rows() if row["stage"] == "wait"]


def test_a_wait_ends_with_the_fragment_that_is_complete_and_is_recorded_once(
    store: Store, tmp_path: Path
) -> None:
    trainer = Trainer(store, tmp_path, ALONE)
    rollout = Rollout(trainer.controls[1], 1, tmp_path, ALONE, roles=Roles(1, 1))
    trainer.link.at_rest += [lambda: trainer.made(rollout)] * 3
    lending, board = trainer.lending, trainer.board
    assert lending.wait_for_fragment(board, 0, [(0,), (1,)]) == (0,)
    assert len(trainer.link.at_rest) == 1, "two tasks"
    trainer.link.at_rest.append(lambda: trainer.made(rollout))
    assert lending.wait_for_fragment(board, 0, [(1,)]) == (1,)
    assert lending.wait_for_fragment(board, 0, [(1,)]) == (1,), "at once"
    assert set(trainer.link.waited) == {0.2}
    assert waits(trainer) == [("first_fragment", 0), ("tail", 0)]
    assert {args[4] for args in trainer.decisions("next_move")} == {0, 1, 2}
    assert (trainer.used, trainer.post.to) == ([], [])


def test_a_later_update_waits_for_no_first_fragment(store: Store, tmp_path: Path) -> None:
    spec = replace(ALONE, updates_per_batch=2)
    trainer = Trainer(store, tmp_path, spec)
    rollout = Rollout(trainer.controls[1], 1, tmp_path, spec, roles=Roles(1, 1))
    trainer.link.at_rest.append(lambda: trainer.made(rollout, 4))
    assert trainer.lending.wait_for_fragment(trainer.board, 1, [(1,)]) == (1,)
    assert waits(trainer) == [("tail", 0)]


def test_a_wait_ends_with_what_goes_wrong_meanwhile(store: Store, tmp_path: Path) -> None:
    trainer = Trainer(store, tmp_path, ALONE)
    failed: Future[None] = Future()
    failed.set_exception(ValueError("it cannot be sent"))
    trainer.link.at_rest.append(lambda: trainer.runner._unsent.append(failed))
    with pytest.raises(ValueError, match="it cannot be sent"):
        trainer.lending.wait_for_fragment(trainer.board, 0, [(0,), (1,)])
    trainer.link.at_rest.append(lambda: trainer.launcher.abort_run("enough"))
    with pytest.raises(Aborted, match="enough"):
        trainer.lending.wait_for_fragment(trainer.board, 0, [(0,), (1,)])


def known(trainer: Trainer, seconds: float = 1.0) -> None:
    """Let trainer 0 know what everything takes, and that a rollout is there."""
    scheduler = trainer.runner.scheduler
    for stage, rank in (("train", 0), ("generate", 0), ("generate", 1)):
        scheduler.expected(stage, rank, seconds)
    scheduler.saw_rank(1, Work(0, seconds))


def test_a_trainer_generates_what_no_rollout_is_left_for_with_the_published_weights(
    store: Store, tmp_path: Path
) -> None:
    trainer = Trainer(store, tmp_path)
    known(trainer)
    trainer.control.set("work/1", "0:1.0:-1:-1:0.0")
    trainer.launcher.mark_lost(1)
    trainer.control.set("work/1", "")
    lending, board = trainer.lending, trainer.board
    found = lending.wait_for_fragment(board, 0, [(0,), (1,)])
    assert (found, trainer.post.to) == ((0,), [0, 0])
    assert trainer.used == ["taken up", "put away"] * 2
    assert 1 not in trainer.runner.scheduler._ranks, "the death was seen"
    assert lending.wait_for_fragment(board, 0, [(1,)]) == (1,)
    rows = trainer.rows()
    assert [row["stage"] for row in rows] == ["lend", "decode", "score", "send"] * 4
    measured = [row["args"] for row in trainer.told if row.get("event") == "measured"]
    switches = [seconds for stage, rank, seconds in measured if (stage, rank) == ("switch", 0)]
    assert len(switches) == 4
    lent = [(args[:3], args[3][1]) for args in trainer.decisions("lend")]
    assert lent == [([0, 0, [[0], [1]]], left) for left in (4, 3)] + [
        ([0, 0, [[1]]], left) for left in (2, 1)
    ]


def test_a_trainer_decides_by_what_it_does_itself_at_present(store: Store, tmp_path: Path) -> None:
    trainer = Trainer(store, tmp_path)
    trainer.runner.announce_work(5)
    *_, (rank, work) = [row["args"] for row in trainer.told if row.get("event") == "saw_rank"]
    assert (rank, work[0]) == (trainer.rank, 5)


def test_a_loan_is_of_the_step_and_the_update_that_wait_for_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, lent = Trainer(store, tmp_path), list[tuple[int, int]]()
    waits = iter([None, None, (1,)])
    monkeypatch.setattr(trainer.lending, "_wait_for_move", lambda *_: next(waits))
    monkeypatch.setattr(trainer.lending, "_lend_one_task", lambda *step: lent.append(step))
    assert trainer.lending.wait_for_fragment(trainer.board, 1, [(1,)]) == (1,)
    assert lent == [(0, 1)] * 2


def test_a_trainer_that_is_no_use_waits_and_asks_once_for_each_change(
    store: Store, tmp_path: Path
) -> None:
    """What takes a rollout a second takes this trainer a thousand."""
    trainer = Trainer(store, tmp_path)
    known(trainer)
    trainer.runner.scheduler.expected("generate", 0, 1000.0)
    rollout = Rollout(trainer.controls[1], 1, tmp_path, SPEC, roles=Roles(1, 1))
    rollout.runner.announce_work(0)
    look = [lambda: None] * 3
    trainer.link.at_rest += [*look, lambda: trainer.made(rollout, 2)]
    assert trainer.lending.wait_for_fragment(trainer.board, 0, [(0,), (1,)]) == (0,)
    assert len(trainer.decisions("lend")) == 1
    assert trainer.post.to == []


@pytest.mark.parametrize("rank", [0, 1])
def test_sharded_trainers_follow_trainer_0_into_loans_thrown_away_work_and_fragments(
    store: Store, tmp_path: Path, rank: int
) -> None:
    roles = Roles(2, 1, lockstep=True)
    trainer = Trainer(store, tmp_path, roles=roles, rank=rank)
    other = Rollout(trainer.controls[1 - rank], 1 - rank, tmp_path, SPEC, Fed(), roles)
    known(trainer)
    trainer.runner.scheduler._timed.add(2)
    # The other trainer is at every piece already, and took one of the tasks.
    trainer.launcher.set("granted", "99")
    trainer.launcher.add("arrived", 99)
    for number, choice in enumerate((-1, -1, -1, -1, 0)):
        if rank:
            trainer.launcher.set(f"agreed/{number + 1}", str(choice))
    taken = other.runner.claim_task(0)
    board = trainer.board

    def comes() -> None:
        run_task(other.runner, taken)
        arrived = [
            m for to, m in zip(other.post.to, other.post.messages(), strict=True) if to == rank
        ]
        trainer.link.waiting += arrived

    trainer.link.at_rest += [comes, lambda: None]
    if rank == 0:
        trainer.on_bubble = lambda board, pending: 1  # type: ignore[method-assign]
    for position in range(4):
        trainer.control.add(f"got/v0/{position}", 1)
    found = trainer.lending.wait_for_fragment(board, 0, [(0,), (1,)])
    assert found == (0,)
    lent = [row for row in trainer.rows() if row["stage"] == "lend"]
    assert len([row for row in lent if not row.get("discarded")]) == 3
    assert [row["step"] for row in lent if row.get("discarded")] == [0] * (rank == 1)
    loans = 3 + (rank == 1)  # what is thrown away is gathered from published weights too
    assert trainer.used == ["taken up", "put away"] * loans
    assert waits(trainer)[-1] == ("straggler", 0)
    if rank == 0:
        assert trainer.control.get("agreed/4") == "0"


def test_a_fragment_that_some_sharded_trainer_lacks_is_not_trained(
    store: Store, tmp_path: Path
) -> None:
    roles = Roles(2, 1, lockstep=True)
    trainer = Trainer(store, tmp_path, roles=roles)
    rollout = Rollout(trainer.controls[2], 2, tmp_path, SPEC, roles=roles)
    trainer.made(rollout, 2)
    while trainer.inbox.receive_message(0.0):
        pass
    cut = partial(trainer.lending._next_trainable_fragment, trainer.board, [(0,), (1,)])
    assert cut() is None
    trainer.runner.claims.mark_received(0, 0)
    assert cut() is None
    trainer.runner.claims.mark_received(0, 1)
    assert cut() == (0,)


@pytest.mark.parametrize("gap", [0, 1])
def test_who_follows_waits_for_the_cells_that_trainer_0_held(
    store: Store, tmp_path: Path, gap: int
) -> None:
    spec, roles = replace(ALONE, gap=gap), Roles(2, 1, lockstep=True)
    trainer = Trainer(store, tmp_path, spec, roles, rank=1)
    rollout = Rollout(trainer.controls[2], 2, tmp_path, spec, roles=roles)
    trainer.link.at_rest += [lambda: trainer.made(rollout)] * 4
    trainer.lending._wait_for_cells(trainer.board, (0,))
    assert len(trainer.link.at_rest) == (2 if gap else 0)
    assert waits(trainer) == [("straggler", 0)]
    trainer.launcher.abort_run("enough")
    trainer.link.at_rest.append(lambda: None)
    with pytest.raises(Aborted, match="enough"):
        trainer.lending._wait_for_cells(StepBoard(spec, trainer.board._place, 1, 0, {}), (0,))


def test_the_search_and_the_head_of_a_queue_are_told_what_the_others_do(
    store: Store, tmp_path: Path
) -> None:
    spec = replace(SPEC, updates_per_batch=2, async_steps=1, stale_fraction=0.5)
    trainer = Trainer(store, tmp_path, spec)
    known(trainer)
    rollout = Rollout(trainer.controls[1], 1, tmp_path, spec, roles=Roles(1, 1))
    rollout.runner._task_seconds = 7.0
    rollout.runner.announce_work(1)
    later = [list(fragment) for fragment in later_fragments(spec, -1)]
    assert later == [[0], [1]]
    before = trainer.spans.now()
    trainer.runner.open_queue(1)
    (opened,) = trainer.decisions("opens")
    assert opened[:4] == [0, 1, later, [6, 2]]
    assert before <= opened[4] <= trainer.spans.now()
    assert trainer.runner.scheduler._ranks[1] == Work(1, 7.0, until=rollout.work().until)
    trainer.runner.claims.begin_behind(0, 3)
    assert trainer.lending.rounds_to_lend(trainer.board, [(1,)]) == 1
    (lent,) = trainer.decisions("lend")
    assert (lent[:2], lent[2], lent[3][1], lent[5]) == ([0, 0], [[1]], 6, 3)
    end = trainer.lending.predicted_end(1)
    scheduler = trainer.runner.scheduler
    facts = trainer.runner.prepare_search(1, later_fragments(spec, -1))
    assert end == pytest.approx(scheduler.predicted_end(*facts), abs=2.0)


def test_sharded_trainers_vote_before_each_choice_and_lend_for_the_step_and_the_update(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, done = Trainer(store, tmp_path, roles=Roles(2, 1, lockstep=True)), list[Any]()
    lending, waits = trainer.lending, iter([None, (1,)])
    monkeypatch.setattr(lending, "_wait_for_move", lambda *_: next(waits))
    monkeypatch.setattr(lending, "_lend_one_task", lambda *step: done.append(step))
    monkeypatch.setattr(lending, "_wait_for_cells", lambda _, fragment: done.append(fragment))
    monkeypatch.setattr(lending._stop_vote, "begin_piece", done.append)
    monkeypatch.setattr(lending._agreement, "agree_on_choice", lambda own: done.append(own) or own)
    assert lending.wait_for_fragment(trainer.board, 1, [(0,), (1,)]) == (1,)
    vote = trainer.inbox.receive_message
    assert done == [vote, -1, (0, 1), vote, 1, (1,)]


def test_a_waiting_trainer_looks_at_everything_in_its_order_and_waits_for_a_message_in_between(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, done = Trainer(store, tmp_path, ALONE), list[str]()
    lending, moves = trainer.lending, iter(["wait", "train"])
    parts: list[tuple[Any, str]] = [
        (lending, "_see_losses"), (lending, "_next_trainable_fragment"), (lending, "_republish_previous"),
        (lending._spans, "record_finished"), (lending._runner, "settle_sends"), (lending._stop_vote, "check_for_stop"),
    ]  # fmt: skip
    for part, name in parts:
        monkeypatch.setattr(part, name, lambda *_, name=name: done.append(name))
    monkeypatch.setattr(lending, "_next_move", lambda *_: done.append("move") or next(moves))
    monkeypatch.setattr(
        lending._inbox, "receive_message", lambda seconds: done.append(str(seconds))
    )
    assert lending._wait_for_move(trainer.board, 0, [(0,)]) is None
    looks = ["0.0", "record_finished", "_see_losses", "_next_trainable_fragment", "move"]
    waits_ = ["_republish_previous", "0.2", "settle_sends", "check_for_stop"]
    assert done[:14] == [*looks, *waits_, *looks]


def test_a_loss_is_shown_to_the_policy_once(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, seen = Trainer(store, tmp_path, roles=Roles(1, 2)), list[None]()
    monkeypatch.setattr(trainer.runner, "report_other_ranks", lambda: seen.append(None))
    counts = []
    for lost in (None, 1, None, 2, None):
        if lost:
            trainer.launcher.mark_lost(lost)
        trainer.lending._see_losses()
        counts.append(len(seen))
    assert counts == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_loan_votes_as_its_trainers_do_and_its_switch_is_half_of_both_ways(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lockstep: bool
) -> None:
    trainer = Trainer(store, tmp_path, roles=Roles(2, 1, lockstep=lockstep))
    lending, runner, done = trainer.lending, trainer.runner, list[Any]()
    task = trainer.plan_tasks(0)[1]
    tasks, clock = iter([task, None]), iter([1.0, 3.0, 10.0, 14.0])
    vote = lending._stop_vote
    monkeypatch.setattr(vote, "begin_piece", lambda: done.append("begin"))
    monkeypatch.setattr(vote, "between_steps", lambda: done.append("between"))
    monkeypatch.setattr(runner, "claim_task", lambda step: done.append(step) or next(tasks))
    monkeypatch.setattr(trainer.spans, "now", lambda: next(clock))

    def generate(begun: Any, stage: str, interrupt: Any) -> None:
        done.append((begun, stage, interrupt(begun)))

    monkeypatch.setattr(runner, "begin_task", lambda task: task)
    monkeypatch.setattr(runner, "generate", generate)
    monkeypatch.setattr(runner, "run_discarded", lambda task, ask: done.append((task, ask(task))))
    monkeypatch.setattr(runner.scheduler, "measured", lambda *facts: done.append(facts))
    lending._lend_one_task(0, 0)
    voted = "begin" if lockstep else "between"
    assert done == [0, voted, (task, "lend", None), ("switch", 0, 3.0)]
    done.clear()
    lending._lend_one_task(0, 0)
    assert done == [0] + ["begin", (trainer.plan_tasks(0)[-1], None)] * lockstep


def test_replicas_train_what_they_hold_whatever_the_others_hold(
    store: Store, tmp_path: Path
) -> None:
    trainer = Trainer(store, tmp_path, roles=Roles(2, 1))
    rollout = Rollout(trainer.controls[2], 2, tmp_path, SPEC, roles=Roles(2, 1))
    trainer.made(rollout, 2)
    while trainer.inbox.receive_message(0.0):
        pass
    assert trainer.lending._next_trainable_fragment(trainer.board, [(0,), (1,)]) == (0,)


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("tag", [False, True])
@pytest.mark.parametrize("rollouts", [0, 1])
def test_trainers_move_together_where_forwards_are_collectives_and_they_may_generate(
    store: Store, tmp_path: Path, lockstep: bool, tag: bool, rollouts: int
) -> None:
    roles = Roles(2, rollouts, lockstep=lockstep)
    trainer = Trainer(store, tmp_path, replace(SPEC, tag=tag and rollouts > 0), roles)
    assert trainer.lending._together == (lockstep and (tag or not rollouts))
    assert trainer.lending._stage == ("lend" if rollouts else "generate")


def test_a_run_that_lends_to_nobody_opens_no_queue(store: Store, tmp_path: Path) -> None:
    trainer = Trainer(store, tmp_path, ALONE)
    known(trainer)
    trainer.runner.open_queue(0)
    assert trainer.decisions("opens") == []


@pytest.mark.parametrize(
    ("changes", "rollouts", "all_weights", "kept"),
    [
        ({}, 1, False, True),
        ({"tag": False}, 1, False, False),
        ({"updates_per_batch": 1}, 1, False, False),
        ({}, 0, False, False),
        ({}, 1, True, True),
    ],
)
def test_the_published_weights_are_in_use_between_updates_and_put_back_bit_for_bit(
    store: Store,
    tmp_path: Path,
    changes: dict[str, Any],
    rollouts: int,
    all_weights: bool,
    kept: bool,
) -> None:
    trainer = Trainer(store, tmp_path)
    policy = trainer.runner._engine.policy
    if not all_weights:
        for name, parameter in policy.transformer.named_parameters():
            parameter.requires_grad_("bias" in name)
    spec = replace(SPEC, **{"updates_per_batch": 2, **changes})
    copy = PublishedCopy(policy, cast(Any, trainer), spec, rollouts)
    assert copy.kept == kept
    own = policy.adapter.trained_parameters()
    published = {name: torch.full_like(p, 0.5, dtype=torch.float64) for name, p in own.items()}
    published[next(iter(own))] = torch.full_like(own[next(iter(own))], 0.5)
    copy.keep_published(published)
    assert bool(copy._tensors) == kept
    if not kept:
        return
    published[next(iter(own))].zero_()
    before = {name: p.detach().clone() for name, p in own.items()}
    with copy.in_use(0):
        assert trainer.used == ["taken up"]
    for _ in range(2):
        with copy.in_use(1):
            assert all((p == 0.5).all() and p.dtype == torch.float32 for p in own.values())
        assert all(torch.equal(p, before[name]) for name, p in own.items())
    assert trainer.used == ["taken up", "put away"]
