"""Updates and the end of an RL step, and what the Strategy does when training ends, well or not."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from digenrl.cluster.control import Aborted
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.store import StoreServer
from digenrl.cluster.vitals import facts_key
from digenrl.cluster.vitals import process_facts as facts_of
from digenrl.cluster.world import World
from digenrl.extensions.tasks.digits import DigitsPolicy
from digenrl.schedule import next_fragment, place_fragment, version_queue
from digenrl.schedule.order import resumed_queue
from digenrl.schedule.ranks import Roles
from digenrl.strategy import disaggregated
from digenrl.strategy.checkpoint_io import DirectoryCheckpointIO
from digenrl.strategy.checkpoints import Checkpoints
from digenrl.strategy.disaggregated import DisaggregatedStrategy
from digenrl.strategy.shared import TrainerState
from digenrl.strategy.shares import Shares
from digenrl.strategy.stop_vote import StopVote
from digenrl.strategy.trainer_step import TrainerStep
from digenrl.strategy.wiring import _board_maker
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
        self.step = TrainerStep(
            self.runtime,
            self.inbox,
            self.lending,
            self.ledger,
            self.shares,
            self.vote,
            self.publisher,
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

    trainer.step.together = together
    batch: Any = object()
    with trainer.step.train_micro_batch(batch):
        trainer.done.append("forward")
    assert trainer.done == [("begin", batch), "together", "forward", "apart"]
    micro_batches = trainer.runtime.setup.micro_batches_per_update
    assert trainer.runtime.setup.loss_scale == micro_batches > 1


def test_gradients_are_reduced_and_scaled_after_the_last_micro_batch_of_an_update(
    store: Store, tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Training(store, tmp_path, Roles(2, 1))
    trainer.state.version, trainer.state.updates_done = 3, 1
    trainer.inbox.open_board(3).left_out[0] = "zero_variance"
    trainer.with_gradients()
    trainer.vote.begin_update = lambda: trainer.done.append("vote")  # type: ignore[method-assign]
    monkeypatch.setattr(torch.distributed, "barrier", lambda: trainer.done.append("barrier"))
    monkeypatch.setattr(
        "digenrl.strategy.shard.synchronise_gradients",
        lambda policy, on: trainer.done.append(("synchronise", on)),
    )
    progress, before = trainer.spans.progress, trainer.spans.progress.current_stretches()[0].number
    ended: list[str] = []
    trainer.ledger.end_fragment = lambda: ended.append("fragment")  # type: ignore[method-assign]
    with trainer.step.accumulate_gradients():
        trainer.step.reduce_gradients()
    apart = [("synchronise", False), "end", ("synchronise", True)]
    assert (trainer.done, trainer.gradients(), ended) == (apart, {1.0}, [])
    assert progress.current_stretches()[0].number > before
    trainer.step.reduce_gradients()
    assert ended == ["fragment"]
    assert trainer.done == [*apart, "end", "vote", "barrier"]
    assert trainer.gradients() == {0.5}, "two trainers, of which the group has one"
    trainer.state.updates_done = 0
    trainer.with_gradients()
    trainer.inbox.open_board(3).left_out.clear()
    trainer.step.reduce_gradients()
    rows = [
        (row["stage"], row["step"], row.get("what", row.get("cause"))) for row in trainer.rows()
    ]
    assert rows == [("wait", 3, "straggler"), ("optimizer", 3, "reduce")] * 2
    assert trainer.runtime.setup.loss_scale == 2 * trainer.runtime.setup.micro_batches_per_update


def test_one_trainer_waits_for_nobody_and_scales_by_what_is_left(
    store: Store, tmp_path: Path
) -> None:
    trainer = Training(store, tmp_path)
    board = trainer.inbox.open_board(0)
    board.gradient_scale = lambda update: 3.0 + update  # type: ignore[method-assign]
    trainer.state.updates_done = 1
    trainer.with_gradients()
    trainer.step.reduce_gradients()
    assert trainer.gradients() == {4.0}
    assert [row["stage"] for row in trainer.rows()] == ["optimizer"]


def test_a_step_ends_with_its_last_update_and_is_published_and_closed(
    store: Store, tmp_path: Path
) -> None:
    trainer = Training(store, tmp_path)
    trainer.publisher.publish_first_version()
    trainer.ledger.open_step(None)
    assert not trainer.step.count_update()
    assert (trainer.state.version, trainer.state.updates_done) == (0, 1)
    assert trainer.step.count_update()
    assert trainer.state.version == 0, "not yet published"
    trainer.step.publish()
    assert (trainer.state.version, trainer.state.updates_done) == (1, 0)
    assert trainer.ledger.facts["samples"] == 4


@pytest.mark.parametrize("sharded", [False, True])
def test_too_little_memory_gives_the_step_up_where_it_can_be_dropped(
    store: Store, tmp_path: Path, sharded: bool
) -> None:
    trainer = Training(store, tmp_path, sharded=sharded)
    trainer.spans.progress.said = "train"
    ends: Any = torch.OutOfMemoryError if sharded else StepGivenUp
    with pytest.raises(ends), trainer.step.tokens_shared():
        raise torch.OutOfMemoryError("no 3 GiB are left")
    assert trainer.control.stopping != sharded
    if not sharded:
        cause = str(trainer.control.get("stop"))
        assert "rank 0, train: use schedule.tsp.batch=1" in cause
        assert "no 3 GiB are left" in cause


# ---- checkpoints


class Trained:
    """A policy with an optimizer that has taken a step, and what Lightning would store of it."""

    def __init__(self, rate: float, value: float) -> None:
        self.policy = DigitsPolicy()
        self.parameters = self.policy.adapter.trained_parameters()
        first, *others = self.parameters.values()
        groups = [{"params": [first], "lr": rate}, {"params": others, "lr": rate / 2}]
        self.optimizer = torch.optim.Adam(groups)
        for parameter in self.parameters.values():
            parameter.grad = torch.full_like(parameter, value)
        self.optimizer.step()

    def content(self, checkpoints: Checkpoints) -> dict[str, Any]:
        weights = {f"policy.transformer.{name}": p for name, p in self.parameters.items()}
        average = {name: p.detach() + 1 for name, p in self.parameters.items()}
        return {
            "epoch": 3,
            "state_dict": weights,
            "optimizer_states": [checkpoints.optimizer_state(self.optimizer)],
            "algorithm": {"average": average, "count": torch.ones(2)},
        }


def test_a_resumed_trainer_has_every_weight_moment_and_average_and_its_own_learning_rate(
    store: Store, tmp_path: Path, group: None
) -> None:
    old, new = Trained(0.5, 2.0), Trained(0.25, 1.0)
    spans = Publishing(store, tmp_path).spans
    everyone: Any = torch.distributed.group.WORLD
    state = TrainerState(previous=dict(old.parameters))
    noted: list[Any] = []

    class Noting(DirectoryCheckpointIO):
        def begin_writing(self, *args: Any) -> Any:
            noted.append(
                (
                    *args[1:3],
                    [id(each) for each in args[4]],
                    spans.progress.current_stretches()[0].stage,
                )
            )
            with args[3]():
                noted.append(spans.progress.current_stretches()[-1].stage)
            return super().begin_writing(*args)

    before = Checkpoints(old.policy, spans, Noting(), everyone, state)
    path = tmp_path / "checkpoints" / "step-000003"
    before.wait_until_written()
    waits: list[str] = []
    before.writing = cast(
        Any, SimpleNamespace(wait_until_complete=lambda: waits.append("the one before"))
    )
    before.begin_writing(old.content(before), path)
    own = [id(each) for each in old.parameters.values()]
    assert noted == [(path, everyone, own, "checkpoint"), "checkpoint"]
    assert waits == ["the one before"]
    before.wait_until_written()
    assert before.writing is None
    assert "wait checkpoint" in spans.progress._finished
    state.previous = None
    before.begin_writing(old.content(before), tmp_path / "checkpoints" / "step-000004")
    before.wait_until_written()
    assert noted[-2][2] == []

    after = Checkpoints(new.policy, spans, DirectoryCheckpointIO(), everyone, TrainerState())
    addresses = [parameter.data_ptr() for parameter in new.parameters.values()]
    found = after.load_checkpoint(path)
    assert [parameter.data_ptr() for parameter in new.parameters.values()] == addresses
    for name, parameter in new.parameters.items():
        assert torch.equal(parameter, old.parameters[name])
        assert torch.equal(found["algorithm"]["average"][name], parameter + 1)
    assert torch.equal(found["algorithm"]["count"], torch.ones(2))
    stored = found["optimizer_states"][0]
    assert [group["params"] for group in stored["param_groups"]] == [
        list(new.parameters)[:1],
        list(new.parameters)[1:],
    ]
    names = {"state": {}, "param_groups": []}
    for number, name in enumerate(new.parameters):
        names["state"][number] = stored["state"][name]  # type: ignore[call-overload]
    numbers = iter(range(len(new.parameters)))
    names["param_groups"] = [
        {**group, "params": [next(numbers) for _ in group["params"]]}
        for group in stored["param_groups"]
    ]
    Checkpoints.load_optimizers([new.optimizer], {"optimizer_states": [names]})
    assert [group["lr"] for group in new.optimizer.param_groups] == [0.25, 0.125]
    for name, parameter in new.parameters.items():
        moments = old.optimizer.state[old.parameters[name]]
        assert moments.keys() == new.optimizer.state[parameter].keys()
        for what, moment in moments.items():
            assert torch.equal(moment, new.optimizer.state[parameter][what])
    with pytest.raises(ValueError, match="shorter"):
        Checkpoints.load_optimizers([new.optimizer, new.optimizer], {"optimizer_states": [names]})


def test_what_a_checkpoint_is_read_to_is_a_parameter_or_like_one(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = DigitsPolicy()
    spans, unused = Publishing(store, tmp_path).spans, cast(Any, None)
    room = Checkpoints(policy, spans, unused, unused, TrainerState())._tensor_for
    name, parameter = next(iter(policy.adapter.trained_parameters().items()))
    half = torch.float16
    own = room(f"state_dict/policy.transformer.{name}", parameter.shape, half)
    assert own.data_ptr() == parameter.data_ptr()
    assert not own.requires_grad
    moment = room(f"optimizer_states/0/state/{name}/exp_avg", parameter.shape, half)
    assert (moment.shape, moment.dtype, moment.requires_grad) == (parameter.shape, half, False)
    assert moment.data_ptr() != parameter.data_ptr()
    asked: list[Any] = []
    like = torch.empty_like
    monkeypatch.setattr(
        torch, "empty_like", lambda *args, **facts: asked.append(args) or like(*args, **facts)
    )
    room(f"algorithm/{name}", parameter.shape, half)
    count = room(f"optimizer_states/0/state/{name}/step", torch.Size(()), torch.float64)
    other = room("algorithm/count", torch.Size((2,)), half)
    assert [id(args[0]) for args in asked] == [id(parameter)], "its device and sharding"
    assert (count.shape, count.dtype) == ((), torch.float64)
    assert (other.shape, other.dtype) == ((2,), half)


# ---- the Strategy itself


class Ending(DisaggregatedStrategy):
    """A Strategy that notes what the end of training does, in its order."""

    def __init__(self, trainer: Publishing) -> None:
        super().__init__(trainer.runtime.setup, DirectoryCheckpointIO())
        self.control, self.link, self.spans = trainer.control, trainer.link, trainer.spans
        self.seen: list[Any] = []

    def wait_for_checkpoint(self) -> None:
        self.seen.append(("saved", self.control.get("done")))

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append(("barrier", self.control.get("done")))
        super().barrier()


def test_a_barrier_is_lightnings_and_a_wait_of_the_rank(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, seen = Ending(Publishing(store, tmp_path)), list[Any]()
    progress = strategy.session.progress
    monkeypatch.setattr(
        DDPStrategy,
        "barrier",
        lambda self, *name: seen.append((*name, progress.current_stretches()[0].stage)),
    )
    DisaggregatedStrategy.barrier(strategy, "name")
    assert seen == [("name", "wait straggler")]


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
    trainer.control.report_error = lambda *args: told.append(args)  # type: ignore[method-assign]
    error = ValueError("wrong")
    strategy.on_exception(error)
    strategy.on_exception(Aborted("another's"))
    assert told == [(True, error, strategy.session.watched)]
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
    trainer.spans.add_span("wait", 0.0, 1.0, cause="tail")
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
    assert strategy.plan_tasks(0) == resumed_queue(ASYNC, 1) != version_queue(ASYNC, 0, 1)
    assert strategy.plan_tasks(1) == version_queue(ASYNC, 1, 1) != version_queue(ASYNC, 1, 2)
    shares = {4: replace(ASYNC, tsp_shard=True), 5: replace(ASYNC, shares=(1.0, 0.0))}
    strategy.parts = cast(Any, SimpleNamespace(shares=SimpleNamespace(spec_at=shares.get)))
    for step, spec in shares.items():
        assert strategy.place_timesteps((1,), step) == place_fragment(spec, 2, (1,))
    assert strategy._timeout == timedelta(seconds=strategy.session.limits.collective_s)
    assert strategy.world_size == 2


def test_the_recorder_gets_the_steps_numbers_and_every_ranks_memory(
    store: Store, tmp_path: Path
) -> None:
    trainer = Publishing(store, tmp_path, roles=Roles(1, 2))
    strategy = Ending(trainer)
    facts, exchange = {"step_s": 2.0}, SimpleNamespace(facts={})
    strategy.parts = cast(
        Any,
        SimpleNamespace(
            ledger=SimpleNamespace(facts=facts), step=SimpleNamespace(exchange=exchange)
        ),
    )
    own = facts_of(trainer.spans.progress)["graphs"]  # of tests before this one
    graphs = {"graphs": own} if own else {}
    assert strategy.step_facts() == {"step_s": 2.0, "peak_gib": None} | graphs
    exchange.facts = {"gradient_bytes": 88.0}
    assert strategy.step_facts()["gradient_bytes"] == 88.0
    exchange.facts = {}
    said = {"peak_gib": {"decode": 1.0, "generate": 1.5}, "graphs": 3}
    trainer.launcher.set(facts_key(2), json.dumps(said))
    trainer.launcher.set(facts_key(0), json.dumps({"peak_gib": {"train": 1.0}, "graphs": 9}))
    trainer.spans.progress.peaks["train"] = 2**31
    found = strategy.step_facts()
    peaks = found["peak_gib"]
    assert found["graphs"] == 3 + own
    assert peaks == {"0": {"train": 2.0}, "2": {"decode": 1.0, "generate": 1.5}}
    assert list(peaks["2"]) == ["decode", "generate"]


class Notes:
    """Whatever is called of it is noted, by its name, and answers with that name."""

    def __init__(self, done: list[Any], **held: Any) -> None:
        self._done = done
        vars(self).update(held)

    def __getattr__(self, name: str) -> Any:
        def called(*args: Any) -> str:
            self._done.append((name, *args))
            return name

        return called


def test_what_lightning_and_researchers_ask_for_is_asked_of_the_part_that_does_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, done = Ending(Publishing(store, tmp_path, roles=Roles(2, 1), rank=1)), list[Any]()
    part: Any = Notes(done)
    strategy.parts = Notes(done, lending=part, step=part, checkpoints=part, publisher=part)  # type: ignore[assignment]
    board: Any = SimpleNamespace(completed={0})
    pending = [(0,), (1,)]
    wanted = next_fragment(ASYNC, pending, board.completed)
    assert strategy.cut_fragment(pending, board) == wanted == (0,)
    assert strategy.on_bubble(board, pending) == "rounds_to_lend"
    assert strategy.block_backward_sync() == "accumulate_gradients"
    strategy.save_checkpoint({"a": 1}, "here")
    DisaggregatedStrategy.wait_for_checkpoint(strategy)
    assert strategy.load_checkpoint("there") == "load_checkpoint"
    assert strategy.optimizer_state("one") == "optimizer_state"
    strategy._optimizers = cast(Any, ["one"])
    strategy.load_optimizer_state_dict({"b": 2})
    strategy.begin_training(cast(Any, SimpleNamespace(current_epoch=5)))
    assert strategy.state.first_step == 5
    assert done == [
        ("rounds_to_lend", board, pending),
        ("accumulate_gradients",),
        ("begin_writing", {"a": 1}, Path("here")),
        ("wait_until_written",),
        ("load_checkpoint", Path("there")),
        ("optimizer_state", "one"),
        ("load_optimizers", ["one"], {"b": 2}),
        ("publish_first_version",),
    ]
    assert strategy.restore_checkpoint_after_setup
    state = {"weight": torch.ones(2)}
    trainer = SimpleNamespace(training=True)
    module: Any = SimpleNamespace(state_dict=state.copy, trainer=trainer)
    strategy._lightning_module = module
    assert strategy.learner is module
    assert strategy.lightning_module_state_dict() == state
    assert strategy.process_dataloader("data") is part
    trainer.training = False
    assert strategy.process_dataloader("data") == "data"
    strategy.world = replace(strategy.world, rank=2)
    trainer.training = True
    assert strategy.process_dataloader("data") == "data", "a rollout"
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    strategy.set_world_ranks()
    assert rank_zero_only.rank == 2


def test_a_micro_batch_and_an_update_do_all_that_is_theirs_in_order(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, done = Ending(Publishing(store, tmp_path)), list[Any]()

    @contextmanager
    def inside(name: str, *args: Any) -> Iterator[None]:
        done.append((name, *args))
        yield
        done.append(f"{name} ends")

    ends, stopping = [False, True, True], [False, True]
    step = Notes(
        done,
        train_micro_batch=partial(inside, "micro-batch"),
        tokens_shared=partial(inside, "shared"),
        count_update=lambda: ends.pop(0),
    )
    scale = strategy.rank_setup.loss_scale
    assert scale > 1
    strategy.parts = Notes(done, step=step, agreement=Notes(done))  # type: ignore[assignment]
    strategy.control = cast(Any, SimpleNamespace(stopping=True))
    monkeypatch.setattr(
        strategy, "reduce_boolean_decision",
        lambda own, all: done.append(("any", own, all)) or stopping.pop(0),
    )  # fmt: skip
    trainer = SimpleNamespace(should_stop=False)
    strategy._lightning_module = cast(Any, SimpleNamespace(trainer=trainer))
    for name in ("training_step", "backward", "optimizer_step"):

        def plain(self: Any, *args: Any, name: str = name, **kwargs: Any) -> Any:
            done.append((f"plain {name}", *args))
            return f"{name} made"

        monkeypatch.setattr(DDPStrategy, name, plain)
    assert strategy.training_step("batch", 1) == "training_step made"
    assert strategy.backward(torch.tensor(2.0), "optimizer") == "backward made"
    assert done == [
        ("micro-batch", "batch"),
        ("plain training_step", "batch", 1),
        "micro-batch ends",
        ("shared",),
        ("plain backward", torch.tensor(2.0 * scale), "optimizer"),
        "shared ends",
        ("reduce_gradients",),
    ]
    for closes, stops in ((False, False), (True, False), (True, True)):
        done.clear()
        assert strategy.optimizer_step("optimizer", "closure", "model") == "optimizer_step made"
        made = [("plain optimizer_step", "optimizer", "closure", "model")]
        assert done == made + [("publish",), ("any", True, False), ("forget_choices",)] * closes
        assert trainer.should_stop == stops


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_rollouts_take_the_fit_loops_place_and_trainers_publish_before_all_else(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    strategy = Ending(Publishing(store, tmp_path, roles=Roles(1, 2)))
    strategy.world, begun = World(rank, 1, 2), list[Any]()
    plain: list[Any] = []
    monkeypatch.setattr(DDPStrategy, "setup_environment", lambda self: plain.append(self))
    monkeypatch.setattr(strategy, "begin_training", begun.append)
    monkeypatch.setattr(strategy, "run_rollouts", lambda: begun.append("rollouts"))
    own = pl.Callback()
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=3, min_epochs=2, logger=False, callbacks=[own],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    strategy._lightning_module = cast(Any, SimpleNamespace(trainer=trainer))
    strategy.setup_environment()
    assert plain == [strategy]
    assert trainer.callbacks == [own], "an evaluation by itself publishes nothing"
    trainer.state.fn = TrainerFn.FITTING
    loop = trainer.fit_loop
    strategy.setup_environment()
    if rank == 0:
        first, second = trainer.callbacks
        assert second is own
        first.on_train_start(trainer, cast(Any, None))
        assert begun == [trainer]
        assert trainer.fit_loop is loop
        assert loop.epoch_loop._broadcast_sigterm_tensor() is None
        assert trainer._signal_connector.register_signal_handlers() is None
        assert "<lambda>" in repr(loop.epoch_loop._broadcast_sigterm_tensor)
    else:
        assert trainer.callbacks == trainer.loggers == []
        found = trainer.fit_loop
        assert (found.min_epochs, found.max_epochs) == (2, 3)
        assert found.epoch_loop is loop.epoch_loop
        assert found._data_source is loop._data_source
        found.run()
        assert begun == ["rollouts"]
        found.teardown()


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(("sharding", "context"), [("ddp", 1), ("hsdp", 1), ("ddp", 2)])
def test_a_trainers_weights_are_shared_out_before_they_are_read_or_moved(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    sharding: str,
    context: int,
) -> None:
    """A rollout shares no weights and no tokens."""
    made, done = Publishing(store, tmp_path), list[Any]()
    world, spec = World(rank, 2, 1), replace(ASYNC, context=context)
    setup = replace(made.runtime.setup, world=world, sharding=sharding, shard_group=2, spec=spec)
    strategy = DisaggregatedStrategy(setup, DirectoryCheckpointIO())
    strategy.parallel_devices = [torch.device("cpu")] * 3
    strategy.parts = cast(Any, SimpleNamespace(step=SimpleNamespace(together=None)))

    def noted(name: str, answer: Any = None) -> Any:
        return lambda *args: done.append((name, *args)) or answer

    monkeypatch.setattr("digenrl.strategy.shard.mesh_of", noted("mesh", "a mesh"))
    monkeypatch.setattr("digenrl.strategy.shard.with_timeout", noted("with_timeout", "bounded"))
    monkeypatch.setattr("digenrl.strategy.shard.shard_policy", noted("shard"))
    monkeypatch.setattr(setup.engine.policy, "fill", noted("fill"))
    monkeypatch.setattr(DDPStrategy, "model_to_device", noted("moved"))
    group = noted("context", SimpleNamespace(share_tokens="together"))
    monkeypatch.setattr("digenrl.strategy.disaggregated.Context", group)
    strategy.model_to_device()
    policy, limit, trains = setup.engine.policy, strategy._timeout, rank == 0
    split = [
        ("mesh", "hsdp", 2, 2, "cpu"),
        ("with_timeout", "a mesh", limit),
        ("shard", policy, "bounded"),
        ("fill", torch.device("cpu")),
    ]
    shares = trains and context > 1
    assert done == [
        *split * (trains and sharding != "ddp"),
        ("moved", strategy),
        *[("context", policy, 2, "cpu", limit)] * shares,
    ]
    assert strategy.parts.step.together == ("together" if shares else None)


@pytest.mark.parametrize(
    ("rank", "role", "group"), [(0, "trainer", "trainers"), (2, "rollout", "rollout-2")]
)
def test_a_rank_joins_the_store_and_its_group_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, role: str, group: str
) -> None:
    handshake = Handshake("secret", seconds=2.0, waiting=8)
    server = StoreServer(socket.create_server(("127.0.0.1", 0)), handshake)
    inner = Store()
    try:
        made, asked = Publishing(inner, tmp_path), list[Any]()
        session = replace(
            made.session,
            store_host=server.host,
            store_port=server.port,
            handshake=handshake,
            run_dir=tmp_path,
            limits=replace(made.session.limits, start_s=77.0),
        )
        world = World(rank, 1, 2)
        prefixes: list[str] = []
        prefixed = torch.distributed.PrefixStore

        def under(prefix: str, store: Any) -> Any:
            prefixes.append(prefix)
            return prefixed(prefix, store)

        monkeypatch.setattr(torch.distributed, "PrefixStore", under)

        def link(*args: Any) -> Any:
            asked.append(args)
            return Notes(asked)

        setup = replace(made.runtime.setup, world=world, session=session, link=link)
        strategy = DisaggregatedStrategy(setup, DirectoryCheckpointIO())
        strategy.parallel_devices = [torch.device("cpu")] * 3
        learner: Any = SimpleNamespace(rollout_parameters=dict)
        strategy._lightning_module = learner
        monkeypatch.setattr(rank_zero_only, "rank", 9)
        seeds: list[None] = []
        monkeypatch.setattr(disaggregated, "reset_seed", lambda: seeds.append(None))
        device, bound = strategy.root_device, list[Any]()
        monkeypatch.setattr(disaggregated.accelerator, "bound_device", bound.append)
        begin = torch.distributed.init_process_group

        def noted(*args: Any, **facts: Any) -> None:
            bound.append(facts["device_id"])
            begin(*args, **facts)

        monkeypatch.setattr(torch.distributed, "init_process_group", noted)
        strategy.setup_distributed()
        assert bound == [device, None]
        assert seeds == [None]
        assert prefixes[0] == f"world/{group}"
        assert rank_zero_only.rank == rank
        assert asked == [(strategy.control, world, session, strategy.root_device)]
        assert (strategy.control._rank, strategy.control._patience) == (rank, 77.0)
        distributed = torch.distributed
        assert distributed.is_initialized()
        assert distributed.get_world_size() == distributed.get_rank() + 1 == 1
        assert distributed.get_backend(strategy.parts.checkpoints._group) == "gloo"
        assert strategy.parts.checkpoints._group is not distributed.group.WORLD
        assert strategy.parts.runner._world is world
        runtime = strategy.runtime
        assert (runtime.setup, runtime.hooks, runtime.learner) == (setup, strategy, learner)
        assert (runtime.state, runtime.control) == (strategy.state, strategy.control)
        strategy.spans.add_span("wait", 0.0, 1.0, cause="tail")
        told: list[Path] = []
        monkeypatch.setattr(disaggregated, "tell_unwritten", told.append)
        strategy.teardown()
        assert told == [tmp_path]
        assert asked[1:] == [("close",)]
        assert not distributed.is_initialized()
        (row,) = (tmp_path / "spans" / f"rank-00{rank}.jsonl").read_text().splitlines()
        facts = json.loads(row)
        assert (facts["rank"], facts["role"], facts["cause"]) == (rank, role, "tail")
    finally:
        server.close()
        inner.close()


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_a_rollout_waits_for_the_trainers_says_that_it_joined_and_sends_all_before_it_leaves(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: bool, joined: bool
) -> None:
    strategy, done = Ending(Publishing(store, tmp_path)), list[Any]()
    rank = 3 if joined else 2
    strategy.world = World(rank, 1, 2)
    strategy.runtime = cast(Any, "runtime")
    strategy.control.set("first_step", "7")
    strategy.parts = cast(Any, SimpleNamespace(runner=SimpleNamespace(claims="claims")))
    monkeypatch.setattr(
        strategy.control, "add_joined_rank", lambda rank: done.append(("join", rank))
    )
    strategy.link.drain = lambda: done.append("drain")  # type: ignore[method-assign]

    class Worker:
        def __init__(self, *given: Any) -> None:
            done.append(given)

        def run_until_done(self) -> None:
            done.append("run")
            if leaves:
                strategy.session.leave.set()

    monkeypatch.setattr(disaggregated, "RolloutWorker", Worker)
    monkeypatch.setattr(disaggregated, "EvaluationWorker", lambda *given: given)
    strategy.run_rollouts()
    assert strategy.state.first_step == 7
    assert "wait startup" in strategy.session.progress._finished
    evaluates = (strategy.rank_setup.evaluated, "runtime", strategy.parts.runner)
    works = ("runtime", strategy.parts.runner, evaluates)
    assert done == [("join", 3)] * joined + [works, "run"] + ["drain"] * leaves


@pytest.mark.parametrize(
    ("sharding", "trainers", "context", "shards", "lockstep", "levelled"),
    [
        ("ddp", 1, 1, 1, False, True),
        ("ddp", 2, 1, 1, False, True),
        ("ddp", 2, 2, 1, True, True),
        ("fsdp", 1, 1, 1, False, False),
        ("fsdp", 2, 1, 2, True, False),
        ("hsdp", 4, 1, 2, True, True),
    ],
)
def test_how_trainers_hold_the_weights_says_what_they_do_together(
    store: Store,
    tmp_path: Path,
    sharding: str,
    trainers: int,
    context: int,
    shards: int,
    lockstep: bool,
    levelled: bool,
) -> None:
    setup = replace(
        Publishing(store, tmp_path).runtime.setup,
        world=World(0, trainers, 1), sharding=sharding, shard_group=2,
        spec=replace(ASYNC, context=context), unequal_gpus=True,
    )  # fmt: skip
    assert (setup.shards, setup.lockstep, setup.levelled) == (shards, lockstep, levelled)
    assert replace(setup, unequal_gpus=False).levelled is False


def test_boards_ask_the_algorithm_for_what_is_left_out(store: Store, tmp_path: Path) -> None:
    spec = replace(ASYNC, zero_variance_groups="drop")
    trainer = Publishing(store, tmp_path, spec)
    weights = trainer.runner._engine.reward_weights

    def answer(number: float) -> Any:
        def asked(rewards: dict[str, Tensor], given: dict[str, float]) -> tuple[Any, ...]:
            return number, rewards, given

        return asked

    learner: Any = SimpleNamespace(useful_samples=answer(1.0), teaching_groups=answer(2.0))
    setup, rewards = trainer.runtime.setup, {"bright": torch.zeros(2, 2)}
    placed: list[Any] = []
    hooks: Any = SimpleNamespace(place_timesteps=lambda *args: placed.append(args) or ((),))
    board = _board_maker(setup, hooks, learner)(3)
    assert board._useful(rewards) == (1.0, rewards, weights)  # type: ignore[misc]
    assert board._teaches(rewards) == (2.0, rewards, weights)  # type: ignore[misc]
    assert board.trains_fragment((1,)) is False
    assert placed == [((1,), 3)]
    assert (board.step, board._rank, board._lockstep, board._neighbours) == (3, 0, False, 1)
    plain = _board_maker(replace(setup, spec=replace(ASYNC, skip_zero=False)), hooks, learner)(3)
    assert (plain._useful, plain._teaches) == (None, None)
    shared = replace(
        setup, world=replace(setup.world, trainers=6), sharding="hsdp", shard_group=2,
        spec=replace(ASYNC, context=3),
    )  # fmt: skip
    board = _board_maker(shared, hooks, learner)(0)
    assert (board._lockstep, board._neighbours) == (True, 6)


def test_shares_are_the_configured_ones_in_every_step() -> None:
    shares = Shares(SPEC, World(0, 1, 1), cast(Any, None), Path(), timed=True)
    assert shares.spec_at(7) is SPEC
    assert shares.checkpoint_state(3) == {}
