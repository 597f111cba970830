"""Publishing by a trainer: content, order, receivers, and what is kept. Then the evaluations that
the trainer opens on rollouts."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from digenrl.cluster.claims import StoredClaims
from digenrl.cluster.control import Control
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.store import StoreClient, StoreServer
from digenrl.cluster.world import Session, World
from digenrl.rollout.evaluation import FixedSamples, tensors_of
from digenrl.schedule import ScheduleSpec
from digenrl.schedule.claims import Claims, evaluation_pieces, evaluation_queue
from digenrl.schedule.ranks import Roles
from digenrl.strategy.evaluating import Evaluations
from digenrl.strategy.publishing import Publisher, relay_routes
from digenrl.strategy.setup import RankRuntime, RankSetup
from digenrl.strategy.shared import TrainerState
from digenrl.strategy.shares import Shares
from digenrl.strategy.step_ledger import StepLedger
from digenrl.strategy.stop_vote import Agreement, StopVote
from digenrl.transport.link import Routes
from digenrl.transport.weights import compute_digest
from digenrl.transport.wire import Message, MessageKind
from digenrl.types import StepGivenUp
from tests.cluster.test_claims import Store
from tests.strategy.test_lending import SPEC, Trainer, store
from tests.strategy.test_rollout_loop import DRAWN

__all__ = ["store"]
HOSTS = {1: "10.0.0.1", 2: "10.0.0.2", 3: "10.0.0.2", 4: "10.0.0.1", 5: "10.0.0.2", 6: "10.0.0.2"}
ASYNC = replace(SPEC, async_steps=1, stale_fraction=0.5)


def test_a_version_goes_once_to_each_other_node_and_to_each_rank_that_joined() -> None:
    handshake = Handshake("secret", seconds=2.0, waiting=8)
    server = StoreServer(socket.create_server(("127.0.0.1", 0)), handshake)
    try:
        control = Control(StoreClient(server.host, server.port, handshake), 0, patience=0.5)
        guest = StoreClient(server.host, server.port, replace(handshake, rank=6))
        Control(guest, 6).add_joined_rank(6)
        for rank, host in HOSTS.items():
            control.set(f"address/{rank}", f"{host}:70{rank}")
        routes = relay_routes(control, range(1, 6), own_host="10.0.0.1")
        assert routes == {1: [], 2: [3, 5], 4: [], 6: []}
    finally:
        server.close()


class Told(Shares):
    """Shares that note what they are told."""

    def __init__(self, spec: ScheduleSpec, world: World, done: list[Any]) -> None:
        super().__init__(spec, world, cast(Any, None), Path(), timed=False)
        self._done = done

    def begin_micro_batch(self, batch: Any) -> None:
        self._done.append(("begin", batch))

    def end_micro_batch(self) -> None:
        self._done.append("end")

    def tell_speed(self) -> None:
        self._done.append("tell")

    def fix_shares(self, version: int) -> None:
        self._done.append(("fix", version))


class Publishing(Trainer):
    """A trainer with its publisher; `done` says in which order things happened."""

    def __init__(
        self,
        store: Store,
        directory: Path,
        spec: ScheduleSpec = ASYNC,
        roles: Roles = Roles(1, 2),  # noqa: B008
        rank: int = 0,
        watched: bool = True,
        drawn: FixedSamples | None = None,
    ) -> None:
        super().__init__(store, directory, spec, roles, rank)
        self.done: list[Any] = []
        self.averages: dict[str, Tensor] = {}
        self.directory, self.state = directory, TrainerState()
        session = Session("", 0, Handshake(), directory, 0.0, host="10.0.0.1", watched=watched)
        self.session = replace(session, progress=self.spans.progress)
        world, engine, sampler = self.runner._world, self.runner._engine, self.runner._sampler
        setup = RankSetup(world, self.session, spec, engine, sampler, 1, evaluated=drawn)
        me = cast(Any, self)
        self.runtime = RankRuntime(setup, me, me, self.state, self.control, self.post, self.spans)
        self.shares = Told(spec, world, self.done)
        self.publisher = Publisher(self.runtime, self.runner, self.shares, self.published)
        set_key, multicast = self.control.set, self.link.multicast

        def noted(key: str, value: str) -> None:
            self.done.append((key, value))
            set_key(key, value)

        def sent(routes: Routes, message: Message) -> None:
            meta = message.meta
            self.done.append((list(routes), meta["version"], "digest" in meta))
            multicast(routes, message)

        self.control.set = noted  # type: ignore[method-assign]
        self.link.multicast = sent  # type: ignore[method-assign]

    def rollout_parameters(self) -> dict[str, Tensor]:
        return dict(self.runner._engine.policy.adapter.trained_parameters())

    def evaluated_parameters(self) -> dict[str, Tensor]:
        return self.rollout_parameters() | self.averages

    def events(self) -> list[dict[str, Any]]:
        lines = (self.directory / "events.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def digest_of(tensors: dict[str, Tensor]) -> str:
    return compute_digest(tensors, tensors)


def test_a_version_is_told_opened_noted_sent_and_fixed_in_this_order(
    store: Store, tmp_path: Path
) -> None:
    trainer = Publishing(store, tmp_path)
    publisher, state = trainer.publisher, trainer.state
    publisher.publish_first_version()
    others, own = [1, 2], trainer.rollout_parameters()
    digests = [digest_of(own)]
    assert trainer.done == [
        ("first_step", "0"), "tell", ("version", "0"), (others, 0, True), ("fix", 0),
    ]  # fmt: skip
    assert (state.version, state.previous, set(state.current)) == (0, None, set(own))
    trainer.done.clear()
    trainer.launcher.mark_lost(2)
    first = {name: p.detach().clone() for name, p in own.items()}
    for parameter in own.values():
        parameter.data = parameter.data + 1.0
    publisher.publish(1)
    digests.append(digest_of(own))
    head = [("version", "1"), ([1], 1, False)]
    assert [each for each in trainer.done if each[0] != [1] or each[2]] == [
        "tell", ("version", "1"), ([1], 1, True), ("fix", 1),
    ]  # fmt: skip
    assert [each for each in trainer.done if each in head] == head, "noted before it is sent"
    assert state.version == 1
    assert state.previous is not None
    for name, parameter in own.items():
        assert torch.equal(state.previous[name], first[name])
        assert torch.equal(state.current[name], parameter)
    assert [args[1] for args in trainer.decisions("opens")] == [0, 1]
    spans = [row for row in trainer.rows() if row["stage"] == "publish"]
    events = trainer.events()
    assert [(row["version"], row["digest"]) for row in spans] == list(enumerate(digests))
    assert [(e["kind"], e["version"], e["digest"]) for e in events] == [
        ("publish", number, digest) for number, digest in enumerate(digests)
    ]


@pytest.mark.parametrize("first", [1, 4])
@pytest.mark.parametrize("async_steps", [0, 1])
def test_a_resumed_run_publishes_the_version_before_first_if_it_has_it(
    store: Store, tmp_path: Path, async_steps: int, first: int
) -> None:
    spec = replace(SPEC, async_steps=async_steps, stale_fraction=0.5 * async_steps)
    trainer = Publishing(store, tmp_path, spec)
    before = {name: torch.ones_like(p) for name, p in trainer.rollout_parameters().items()}
    trainer.state.first_step = first
    trainer.state.previous = before if async_steps else None
    for rank in (1, 2):
        trainer.runner.scheduler.expected("generate", rank, 1.0)
    trainer.publisher.publish_first_version()
    versions = [
        value for key, value in (d for d in trainer.done if len(d) == 2) if key == "version"
    ]
    assert versions == [str(first - 1)] * async_steps + [str(first)]
    assert trainer.state.version == first
    assert [args[1] for args in trainer.decisions("opens")] == [first]
    if async_steps:
        assert all((p == 1.0).all() for p in trainer.state.previous.values())
    else:
        assert trainer.state.previous is None
    assert ([1, 2], first, False) in trainer.done, "the weights themselves"


def test_who_joins_gets_the_present_version_and_old_claims_are_forgotten(
    store: Store, tmp_path: Path
) -> None:
    trainer = Publishing(store, tmp_path)
    trainer.publisher.publish_first_version()
    trainer.runner.claim_task(0)
    trainer.done.clear()
    trainer.publisher.send_to_joined(7)
    assert {tuple(routes) for routes, _, _ in trainer.done} == {(7,)}
    assert {version for _, version, _ in trainer.done} == {0}
    assert [ended for _, _, ended in trainer.done][-1]
    kept = {n: p.detach().clone() for n, p in trainer.rollout_parameters().items()}
    trainer.publisher.publish(1)
    assert trainer.control.get("owner/v0/0")
    trainer.publisher.publish(2)
    assert trainer.control.get("owner/v0/0") is None
    assert all(torch.equal(trainer.state.current[name], p) for name, p in kept.items())


@pytest.mark.parametrize(("watched", "version"), [(True, 3), (False, 3), (False, 0)])
def test_ranks_relay_where_no_launcher_watches_and_bytes_are_sent(
    store: Store, tmp_path: Path, watched: bool, version: int
) -> None:
    trainer = Publishing(store, tmp_path, roles=Roles(1, 3), watched=watched)
    for rank, host in ((1, "10.0.0.2"), (2, "10.0.0.2"), (3, "10.0.0.1")):
        trainer.launcher.set(f"address/{rank}", f"{host}:7{rank}")
    alone: dict[int, list[int]] = {1: [], 2: [], 3: []}
    wanted = alone if watched or not version else {1: [2], 3: []}
    assert trainer.publisher._routes_for(version) == wanted


def test_another_trainer_proves_its_weights_and_keeps_and_sends_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proven: list[Any] = []
    monkeypatch.setattr(
        "digenrl.strategy.gradients.assert_equal_digests", lambda *args: proven.append(args)
    )
    trainer = Publishing(store, tmp_path, roles=Roles(2, 1), rank=1)
    trainer.state.previous = trainer.rollout_parameters()
    trainer.publisher.publish_first_version()
    digest = digest_of(trainer.rollout_parameters())
    assert proven == [(digest, 2, 0)]
    assert trainer.done == ["tell", ("fix", 0)]
    assert (trainer.state.previous, trainer.state.current, trainer.post.to) == (None, {}, [])
    (row,) = trainer.rows()
    assert row["digest"] == digest
    assert not (tmp_path / "events.jsonl").exists()


@pytest.mark.parametrize(
    ("sharding", "proves", "gathers"),
    [("ddp", 2, 0), ("hsdp", 2, 0), ("fsdp", None, 1)],
)
@pytest.mark.parametrize("unequal", [False, True])
def test_what_another_trainer_does_for_a_version_follows_from_how_weights_are_held(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sharding: str,
    proves: int | None,
    gathers: int,
    unequal: bool,
) -> None:
    """Replicas prove equal digests, and on unequal GPUs take trainer 0's weights before; shards
    only take part in gathering."""
    done: list[Any] = []
    trainer = Publishing(store, tmp_path, roles=Roles(2, 1), rank=1)
    setup = replace(trainer.runtime.setup, sharding=sharding, shard_group=1, unequal_gpus=unequal)
    for module, name in (
        ("gradients", "assert_equal_digests"), ("gradients", "follow_first"), ("publishing", "take_part"),
    ):  # fmt: skip
        monkeypatch.setattr(
            f"digenrl.strategy.{module}.{name}",
            lambda *args, name=name: done.append((name, args)),
        )
    runtime = replace(trainer.runtime, setup=setup)
    publisher = Publisher(runtime, trainer.runner, trainer.shares, trainer.published)
    publisher.publish_first_version()
    own = trainer.rollout_parameters()
    names = [name for name, _ in done]
    levels = unequal and sharding != "fsdp"
    wanted = ["follow_first"] * levels + ["assert_equal_digests"] * bool(proves)
    assert names == wanted + ["take_part"] * gathers
    if levels:
        weights, trainers = done[0][1]
        assert trainers == 2
        assert all(
            map(
                torch.equal,
                weights,
                trainer.runner._engine.policy.adapter.trained_parameters().values(),
            )
        )
    if proves:
        assert done[-1][1] == (digest_of(own), proves, 0)
    else:
        assert done[-1][1][0].keys() == own.keys()
    done.clear()
    trainer.averages = {name: p + 1 for name, p in own.items()}
    assert publisher.publish_evaluated(0) == ""
    assert [name for name, _ in done] == ["take_part"] * (sharding != "ddp")


def test_the_published_copy_is_kept_for_loans_between_updates(store: Store, tmp_path: Path) -> None:
    trainer, kept = Publishing(store, tmp_path), list[Any]()
    trainer.published.keep_published = kept.append  # type: ignore[method-assign, assignment]
    trainer.publisher.publish_first_version()
    (tensors,) = kept
    assert tensors.keys() == trainer.rollout_parameters().keys()


# ---- evaluations


class Evaluated(Publishing):
    """The same with the trainers' part of evaluations on rollouts."""

    def __init__(self, store: Store, directory: Path, rank: int = 0) -> None:
        super().__init__(store, directory, SPEC, Roles(2, 2), rank, drawn=DRAWN)
        world, spans = self.runner._world, self.spans
        ledger = StepLedger(SPEC, world, spans, self.runner.scheduler, directory)
        self.ledger = ledger
        vote = StopVote(self.control, world, spans.progress, False, lambda: True)
        agreement = Agreement(self.control, world, spans.progress)
        self.evaluations = Evaluations(
            self.runtime,
            self.runner.claims,
            vote,
            ledger,
            self.inbox.receive_message,
            agreement.agree_on_choice,
            self.publisher.publish_evaluated,
        )
        self.inbox.set_handler(MessageKind.EVALUATION, self.evaluations.add_piece)
        self.launcher.add("arrived", 99)
        self.launcher.set("granted", "99")

    def piece(self, number: int, version: int = 0) -> Callable[[], None]:
        """Return what lets a piece arrive."""
        made = tensors_of(DRAWN.draw_pieces(self.runner._engine, [number]))
        message = Message(MessageKind.EVALUATION, {"version": version, "piece": number}, made)
        return lambda: self.link.waiting.append(message)


def test_trainer_0_waits_for_every_piece_once_and_hands_them_on(
    store: Store, tmp_path: Path
) -> None:
    trainer = Evaluated(store, tmp_path)
    trainer.evaluations.open_evaluation(0)
    assert trainer.evaluations.on_rollouts
    assert trainer.control.get("evaluation") == "0:"
    rollout = Claims(StoredClaims(trainer.controls[2]), 2)
    pieces = evaluation_pieces(0, 2)
    for _ in pieces:
        rollout.take_next_task(evaluation_queue(0), pieces, range(2))
    other = trainer.piece(1, version=5)
    trainer.link.at_rest += [trainer.piece(1), other, trainer.piece(1), trainer.piece(0)]
    found: list[Any] = []
    votes: list[Any] = []
    trainer.evaluations._stop_vote.begin_piece = lambda: votes.append(
        trainer.control.get("agreed/1")
    )  # type: ignore[method-assign, assignment]
    paused = trainer.ledger._paused
    trainer.evaluations.finish_evaluation(found.append)
    assert votes == [None], "once, before they agree"
    assert not trainer.link.at_rest
    assert set(found[0]) == {0, 1}
    for number, pictures in found[0].items():
        wanted = DRAWN.draw_pieces(trainer.runner._engine, [number])
        assert torch.equal(pictures.media, wanted.media)
        assert pictures.prompts == wanted.prompts
        assert trainer.runner.claims.held_by(evaluation_queue(0), number, 2)
        assert not trainer.runner.claims.held_by(evaluation_queue(0), number, 3)
    assert trainer.control.get("evaluation") is None
    assert trainer.control.get("agreed/1") == "1"
    assert trainer.ledger._paused > paused, "not the step's time"
    (waited,) = (row for row in trainer.rows() if row["stage"] == "wait")
    assert (waited["cause"], waited["step"]) == ("evaluation", 0)
    assert trainer.evaluations._version == -1
    trainer.piece(0)()
    trainer.inbox.receive_message(0.0)
    assert trainer.evaluations._arrived == {}, "late"


def test_trainers_make_the_pieces_that_no_rollout_with_the_weights_is_left_for(
    store: Store, tmp_path: Path
) -> None:
    trainer = Evaluated(store, tmp_path)
    name = next(iter(trainer.rollout_parameters()))
    found: list[Any] = []
    trainer.averages = {name: torch.full_like(trainer.rollout_parameters()[name], 2.0)}
    trainer.launcher.mark_lost(3)
    trainer.evaluations.open_evaluation(0)
    sent = [each for each in trainer.done if len(each) == 3]
    digest = digest_of(trainer.evaluated_parameters())
    assert {(tuple(to), number) for to, number, _ in sent} == {((2,), -1)}
    assert sent[-1][2]
    assert trainer.control.get("evaluation") == f"0:{digest}"
    trainer.link.at_rest += [trainer.piece(0), lambda: trainer.launcher.mark_lost(2)]
    trainer.evaluations.finish_evaluation(found.append)
    assert not trainer.link.at_rest
    trainer.averages = {}
    trainer.done.clear()
    trainer.evaluations.open_evaluation(1)
    assert trainer.done == [("evaluation", "1:")], "they hold the version itself"
    trainer.evaluations.finish_evaluation(found.append)
    assert found == [None, None]
    assert [trainer.control.get(f"agreed/{number}") for number in (1, 2)] == ["0", "0"]
    spans = [row for row in trainer.rows() if row.get("evaluated")]
    assert [(row["version"], row["digest"]) for row in spans] == [(0, digest)]


def test_a_rollout_that_joined_after_the_average_was_sent_counts_for_nobody(
    store: Store, tmp_path: Path
) -> None:
    trainer = Evaluated(store, tmp_path)
    name = next(iter(trainer.rollout_parameters()))
    trainer.averages = {name: torch.full_like(trainer.rollout_parameters()[name], 2.0)}
    trainer.evaluations.open_evaluation(0)
    trainer.control.surviving_ranks = lambda ranks: [4]  # type: ignore[method-assign, assignment]
    assert not trainer.evaluations._wait_for_pieces()
    trainer.evaluations._makers = None
    trainer.link.at_rest += [trainer.piece(0), trainer.piece(1)]
    assert trainer.evaluations._wait_for_pieces()


def test_another_trainer_opens_nothing_and_follows(store: Store, tmp_path: Path) -> None:
    trainer = Evaluated(store, tmp_path, rank=1)
    trainer.launcher.set("agreed/1", "1")
    trainer.evaluations.open_evaluation(0)
    assert trainer.control.get("evaluation") is None
    trainer.launcher.set("evaluation", "0:")
    found: list[Any] = []
    trainer.evaluations.finish_evaluation(found.append)
    assert found == [{}]
    assert trainer.control.get("evaluation") == "0:"
    assert trainer.publisher.publish_evaluated(3) == ""
    trainer.averages = {n: p + 1 for n, p in trainer.rollout_parameters().items()}
    assert trainer.publisher.publish_evaluated(3) == ""
    assert trainer.post.to == []


def test_an_evaluation_ends_with_the_step_that_is_given_up(store: Store, tmp_path: Path) -> None:
    trainer = Evaluated(store, tmp_path)
    trainer.evaluations.open_evaluation(0)
    trainer.link.at_rest.append(lambda: trainer.launcher.set("give_up", "1"))
    with pytest.raises(StepGivenUp):
        trainer.evaluations.finish_evaluation(lambda pieces: None)
