"""Updates and the end of an RL step, and what the Strategy does when training ends, well or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from digenrl.cluster.control import Aborted
from digenrl.cluster.vitals import facts as facts_of
from digenrl.cluster.vitals import facts_key
from digenrl.schedule import place, queue
from digenrl.schedule.order import resumed_queue
from digenrl.schedule.ranks import Roles
from digenrl.strategy.checkpoint_io import DirectoryCheckpointIO
from digenrl.strategy.disaggregated import DisaggregatedStrategy
from digenrl.strategy.shares import Shares
from digenrl.strategy.steps import Steps
from digenrl.strategy.stop_vote import StopVote
from digenrl.strategy.wiring import _boards
from digenrl.types import StepGivenUp
from tests.cluster.test_claims import Store
from tests.strategy.test_gradients import group
from tests.strategy.test_lending import SPEC, store
from tests.strategy.test_publishing import ASYNC, Publishing

__all__ = ["group", "store"]


class Training(Publishing):
    """A trainer with its updates."""

    def __init__(
        self,
        store: Store,
        directory: Path,
        roles: Roles = Roles(1, 1),  # noqa: B008
        sharded: bool = False,
    ) -> None:
        spec = replace(SPEC, updates_per_batch=2, zero_variance_groups="drop")
        super().__init__(store, directory, spec, roles)
        self.launcher.add("arrived", 99)
        self.droppable = True
        world, progress = self.runner._world, self.spans.progress
        self.vote = StopVote(self.control, world, progress, sharded, lambda: self.droppable)
        self.steps = Steps(
            self.ties, self.ledger, self.shares, self.inbox, self.vote, self.publisher
        )
        self.weights = list(self.rollout_parameters().values())

    def with_gradients(self) -> None:
        for parameter in self.weights:
            parameter.grad = torch.ones_like(parameter)

    def gradients(self) -> set[float]:
        return {value for p in self.weights for value in p.grad.unique().tolist()}  # type: ignore[union-attr]


def test_a_micro_batch_is_told_and_computed_in_the_group_of_its_tokens(
    store: Store, tmp_path: Path
) -> None:
    trainer = Training(store, tmp_path)

    @contextmanager
    def together() -> Iterator[None]:
        trainer.done.append("together")
        yield
        trainer.done.append("apart")

    trainer.steps.together = together
    batch: Any = object()
    with trainer.steps.micro_batch(batch):
        trainer.done.append("forward")
    assert trainer.done == [("begin", batch), "together", "forward", "apart"]
    micro_batches = trainer.ties.setup.micro_batches_per_update
    assert trainer.steps.loss_scale == micro_batches > 1


def test_gradients_are_reduced_and_scaled_after_the_last_micro_batch_of_an_update(
    store: Store, tmp_path: Path, group: None
) -> None:
    trainer = Training(store, tmp_path, Roles(2, 1))
    trainer.state.version, trainer.state.updates_done = 3, 1
    trainer.inbox.open(3).left_out[0] = "zero_variance"
    trainer.with_gradients()
    trainer.vote.begin_update = lambda: trainer.done.append("vote")  # type: ignore[method-assign]
    progress, before = trainer.spans.progress, trainer.spans.progress.now()[0].number
    ended: list[str] = []
    trainer.ledger.end_fragment = lambda: ended.append("fragment")  # type: ignore[method-assign]
    with trainer.steps.accumulation():
        trainer.steps.backward_done()
    assert (trainer.done, trainer.gradients(), ended) == (["end"], {1.0}, [])
    assert progress.now()[0].number > before
    trainer.steps.backward_done()
    assert ended == ["fragment"]
    assert trainer.done == ["end", "end", "vote"]
    assert trainer.gradients() == {0.5}, "two trainers, of which the group has one"
    trainer.state.updates_done = 0
    trainer.with_gradients()
    trainer.inbox.open(3).left_out.clear()
    trainer.steps.backward_done()
    rows = [
        (row["stage"], row["step"], row.get("what", row.get("cause"))) for row in trainer.rows()
    ]
    assert rows == [("wait", 3, "straggler"), ("optimizer", 3, "reduce")] * 2
    assert trainer.steps.loss_scale == 2 * trainer.ties.setup.micro_batches_per_update


def test_one_trainer_waits_for_nobody_and_scales_by_what_is_left(
    store: Store, tmp_path: Path
) -> None:
    trainer = Training(store, tmp_path)
    board = trainer.inbox.open(0)
    board.gradient_scale = lambda update: 3.0 + update  # type: ignore[method-assign]
    trainer.state.updates_done = 1
    trainer.with_gradients()
    trainer.steps.backward_done()
    assert trainer.gradients() == {4.0}
    assert [row["stage"] for row in trainer.rows()] == ["optimizer"]


def test_a_step_ends_with_its_last_update_and_is_published_and_closed(
    store: Store, tmp_path: Path
) -> None:
    trainer = Training(store, tmp_path)
    trainer.publisher.begin()
    trainer.ledger.open(None)
    assert not trainer.steps.update_done()
    assert (trainer.state.version, trainer.state.updates_done) == (0, 1)
    assert trainer.steps.update_done()
    assert (trainer.state.version, trainer.state.updates_done) == (1, 0)
    assert trainer.ledger.facts["samples"] == 4


@pytest.mark.parametrize("sharded", [False, True])
def test_too_little_memory_gives_the_step_up_where_it_can_be_dropped(
    store: Store, tmp_path: Path, sharded: bool
) -> None:
    trainer = Training(store, tmp_path, sharded=sharded)
    trainer.spans.progress.said = "train"
    ends: Any = torch.OutOfMemoryError if sharded else StepGivenUp
    with pytest.raises(ends), trainer.steps.tokens_shared():
        raise torch.OutOfMemoryError("no 3 GiB are left")
    assert trainer.control.stopping != sharded
    if not sharded:
        cause = str(trainer.control.get("stop"))
        assert "rank 0, train: use schedule.tsp.batch=1" in cause
        assert "no 3 GiB are left" in cause


# ---- the Strategy itself


class Ending(DisaggregatedStrategy):
    """A Strategy that notes what the end of training does, in its order."""

    def __init__(self, trainer: Publishing) -> None:
        super().__init__(trainer.ties.setup, DirectoryCheckpointIO())
        self.control, self.link, self.spans = trainer.control, trainer.link, trainer.spans
        self.seen: list[Any] = []

    def saved(self) -> None:
        self.seen.append(("saved", self.control.get("done")))

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append(("barrier", self.control.get("done")))
        super().barrier()


@pytest.mark.parametrize("given_up", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_trainers_end_together_after_rollouts_can_know_that_the_run_is_over(
    store: Store, tmp_path: Path, rank: int, given_up: bool
) -> None:
    strategy = Ending(Publishing(store, tmp_path, roles=Roles(2, 1), rank=rank))
    strategy.on_exception(StepGivenUp()) if given_up else strategy.on_train_end()
    assert strategy.seen == [("saved", None), ("barrier", None if rank else "1")]
    assert "wait straggler" in strategy.session.progress._finished
    assert strategy.is_global_zero == (rank == 0)


def test_an_error_is_reported_with_what_the_rank_did_unless_it_is_anothers(
    store: Store, tmp_path: Path
) -> None:
    trainer = Publishing(store, tmp_path)
    strategy = Ending(trainer)
    told: list[Any] = []
    trainer.control.report = lambda *args: told.append(args)  # type: ignore[method-assign]
    error = ValueError("wrong")
    strategy.on_exception(error)
    strategy.on_exception(Aborted("another's"))
    assert told == [(True, error)]
    trainer.spans.progress.said = "generate"
    strategy.on_exception(torch.OutOfMemoryError("no 3 GiB are left"))
    assert "rank 0, generate: use a smaller sampling.task_size" in str(told[1][1])
    assert strategy.seen == []
    del strategy.control
    strategy.on_exception(error)
    assert len(told) == 2, "nobody can be told"


def test_what_was_opened_is_closed(store: Store, tmp_path: Path) -> None:
    trainer = Publishing(store, tmp_path)
    strategy, closed = Ending(trainer), list[Any]()
    trainer.spans.add("wait", 0.0, 1.0, cause="tail")
    trainer.link.close = lambda: closed.append("link")  # type: ignore[method-assign]
    strategy.parts = cast(Any, SimpleNamespace(close=lambda: closed.append("parts")))
    strategy.engine.close = closed.append  # type: ignore[method-assign, assignment]
    strategy.teardown()
    assert closed == ["link", "parts", strategy.session.limits.leave_s]
    assert "tail" in trainer._path.read_text()
    del strategy.link, strategy.parts
    strategy.teardown()
    assert len(closed) == 4, "what never came to be needs no end"


def test_hooks_follow_the_schedule_the_steps_shares_and_where_the_attempt_began(
    store: Store, tmp_path: Path
) -> None:
    strategy = Ending(Publishing(store, tmp_path, roles=Roles(2, 1)))
    strategy.state.first_step = 1
    assert strategy.plan_tasks(0) == resumed_queue(ASYNC, 1) != queue(ASYNC, 0, 1)
    assert strategy.plan_tasks(1) == queue(ASYNC, 1, 1) != queue(ASYNC, 1, 2)
    shares = {4: replace(ASYNC, tsp_shard=True), 5: replace(ASYNC, shares=(1.0, 0.0))}
    strategy.parts = cast(Any, SimpleNamespace(shares=SimpleNamespace(spec_at=shares.get)))
    for step, spec in shares.items():
        assert strategy.place_timesteps((1,), step) == place(spec, 2, (1,))
    assert strategy._timeout == timedelta(seconds=strategy.session.limits.collective_s)
    assert strategy.world_size == 2


def test_the_recorder_gets_the_steps_numbers_and_every_ranks_memory(
    store: Store, tmp_path: Path
) -> None:
    trainer = Publishing(store, tmp_path, roles=Roles(1, 2))
    strategy = Ending(trainer)
    facts = {"step_s": 2.0}
    strategy.parts = cast(Any, SimpleNamespace(ledger=SimpleNamespace(facts=facts)))
    own = facts_of(trainer.spans.progress)["graphs"]  # of tests before this one
    graphs = {"graphs": own} if own else {}
    assert strategy.step_facts() == {"step_s": 2.0, "peak_gib": None} | graphs
    said = {"peak_gib": {"decode": 1.0, "generate": 1.5}, "graphs": 3}
    trainer.launcher.set(facts_key(2), json.dumps(said))
    trainer.launcher.set(facts_key(0), json.dumps({"peak_gib": {"train": 1.0}, "graphs": 9}))
    trainer.spans.progress.peaks["train"] = 2**31
    found = strategy.step_facts()
    peaks = found["peak_gib"]
    assert found["graphs"] == 3 + own
    assert peaks == {"0": {"train": 2.0}, "2": {"decode": 1.0, "generate": 1.5}}
    assert list(peaks["2"]) == ["decode", "generate"]


def test_boards_ask_the_algorithm_for_what_is_left_out(store: Store, tmp_path: Path) -> None:
    spec = replace(ASYNC, zero_variance_groups="drop")
    trainer = Publishing(store, tmp_path, spec)
    weights = trainer.runner._engine.reward_weights

    def answer(number: float) -> Any:
        def asked(rewards: dict[str, Tensor], given: dict[str, float]) -> tuple[Any, ...]:
            return number, rewards, given

        return asked

    learner: Any = SimpleNamespace(useful=answer(1.0), teaches=answer(2.0))
    setup, rewards = trainer.ties.setup, {"bright": torch.zeros(2, 2)}
    placed: list[Any] = []
    hooks: Any = SimpleNamespace(place_timesteps=lambda *args: placed.append(args) or ((),))
    board = _boards(setup, hooks, learner)(3)
    assert board._useful(rewards) == (1.0, rewards, weights)  # type: ignore[misc]
    assert board._teaches(rewards) == (2.0, rewards, weights)  # type: ignore[misc]
    assert board.concerns((1,)) is False
    assert placed == [((1,), 3)]
    assert (board.step, board._rank, board._lockstep, board._neighbours) == (3, 0, False, 1)
    plain = _boards(replace(setup, spec=replace(ASYNC, skip_zero=False)), hooks, learner)(3)
    assert (plain._useful, plain._teaches) == (None, None)
    shared = replace(
        setup, world=replace(setup.world, trainers=6), sharding="hsdp", shard_group=2,
        spec=replace(ASYNC, context=3),
    )  # fmt: skip
    board = _boards(shared, hooks, learner)(0)
    assert (board._lockstep, board._neighbours) == (True, 6)


def test_shares_are_the_configured_ones_in_every_step() -> None:
    shares = Shares(SPEC)
    assert shares.spec_at(7) is SPEC
    assert shares.state(3) == {}
