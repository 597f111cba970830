"""Weights by broadcast: the same bytes as by streams, with a member that dies in the middle too."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from digenrl import config as configuration
from digenrl.cluster.control import Control
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.limits import Limits
from digenrl.cluster.store import StoreClient, StoreServer
from digenrl.config.errors import ConfigError
from digenrl.parts import publishes_by_broadcast
from digenrl.transport import broadcast
from digenrl.transport.broadcast import Audience, BroadcastLink
from digenrl.transport.link import Routes, SocketLink
from digenrl.transport.weights import Arrivals, Version, plan_buckets, publish
from digenrl.transport.wire import Message
from tests.training import SMALL, Train, fault, watch

pytestmark = pytest.mark.processes
HOST, OURS = "127.0.0.1", Handshake("secret", seconds=2.0, waiting=8)


class Ranks:
    """A sender and three receivers in one process, each with its threads."""

    def __init__(self) -> None:
        self.server = StoreServer(socket.create_server((HOST, 0)), OURS)
        self.controls = [
            Control(StoreClient(HOST, self.server.port, OURS), rank, patience=5.0)
            for rank in range(4)
        ]
        self.told: list[tuple[str, Any]] = []
        self.links = [self._link(rank) for rank in range(4)]
        self.arrivals = {rank: Arrivals(weights()) for rank in (1, 2, 3)}

    def _link(self, rank: int) -> BroadcastLink:
        control = self.controls[rank]
        audience = Audience(
            range(4),
            StoreClient(HOST, self.server.port, OURS),
            torch.device("cpu"),
            lambda kind, facts: self.told.append((kind, facts)),
        )
        return BroadcastLink(
            audience, control, rank, HOST, OURS, limits=Limits(verdict_s=2.0, leave_s=1.0)
        )

    def publish(self, number: int, scale: float) -> Version:
        routes: Routes = dict.fromkeys(self.controls[0].surviving_ranks((1, 2, 3)), ())
        return publish(number, weights(scale), self.links[0], routes, lambda digest: None)

    def arrived(self, rank: int) -> Version:
        """The next version of a rank."""
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline:
            message = self.links[rank].receive(1.0)
            if (
                message is not None
                and (version := self.arrivals[rank].add_message(message)) is not None
            ):
                return version
        raise AssertionError(f"no version came to rank {rank}; told: {self.told}")

    def close(self) -> None:
        for link in reversed(self.links):
            link.close()
        self.server.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


def weights(scale: float = 0.0) -> dict[str, Tensor]:
    """Three buckets."""
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(1 << 20, generator=generator) * scale for name in "abc"}


def streams(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(sender, bytes) of the messages with tensors that go over sockets."""
    found: list[tuple[int, int]] = []
    send = SocketLink.send

    def counted(link: SocketLink, peer: int, message: Message) -> None:
        if message.tensors:
            found.append((peer, sum(tensor.numel() for tensor in message.tensors.values())))
        send(link, peer, message)

    monkeypatch.setattr(SocketLink, "send", counted)
    return found


def assert_whole(found: Version, sent: Version) -> None:
    assert (found.number, found.digest) == (sent.number, sent.digest)
    assert all(torch.equal(found.tensors[name], value) for name, value in sent.tensors.items())


def test_versions_arrive_bit_for_bit_without_a_byte_on_the_sockets(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    over_sockets = streams(monkeypatch)
    for number in (1, 2):
        sent = ranks.publish(number, float(number))
        for rank in (1, 2, 3):
            assert_whole(ranks.arrived(rank), sent)
    assert len(plan_buckets(weights())) == 3
    assert not over_sockets
    assert [kind for kind, _ in ranks.told] == ["publication"]


def test_a_version_that_lost_a_member_half_way_arrives_whole_as_streams(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 3 leaves at the second bucket of version 2; what ranks 1 and 2 have by then they do not
    get twice."""
    sent = ranks.publish(1, 1.0)
    assert_whole(ranks.arrived(1), sent)
    taken: Callable[..., Message] = ranks.links[3]._receive_bucket

    def dies(message: Message) -> Message:
        if message.meta["bucket"] == 1:
            ranks.controls[0].mark_lost(3)
            ranks.links[3]._leave_group()
        return taken(message)

    monkeypatch.setattr(ranks.links[3], "_receive_bucket", dies)
    over_sockets = streams(monkeypatch)
    second, third = ranks.publish(2, 2.0), ranks.publish(3, 3.0)
    assert_whole(ranks.arrived(2), sent)
    for rank in (1, 2):
        assert_whole(ranks.arrived(rank), second)
        assert_whole(ranks.arrived(rank), third)
    assert {peer for peer, _ in over_sockets} == {1, 2}
    (said,) = [facts["message"] for kind, facts in ranks.told if kind == "warning"]
    assert "no longer broadcast, because rank 3 is gone: they travel as streams" in said


# ---- real commands

TAKEN = "digenrl.transport.broadcast.BroadcastLink._receive_bucket"
"""A fault's point: a rollout takes a bucket."""
APART = (*SMALL, "allocation.trainers=1", "allocation.rollouts=2", "max_rl_steps=5")


def learned(train: Train) -> dict[str, Tensor]:
    watch(train)
    assert train.finish() == 0, train.stderr
    return load_file(train.run_dir / "checkpoints/last/policy.safetensors")


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.slow
@pytest.mark.parametrize("late", [0.0, 4.0])
def test_a_rollout_killed_in_a_broadcast_changes_no_weight(running: Any, late: float) -> None:
    """Against a calm run that publishes by streams; the first version was broadcast to both. Once,
    the trainer did not wait for all rollouts. A rollout that began 2 s late got a single broadcast
    in the run, was never killed, and nothing warned. This was a failure without explanation."""
    killed = running(
        *APART,
        "network.publication=broadcast",
        "+callbacks.there={_target_: tests.strategy.faults.AllThere}",
        *fault(TAKEN, 2, "kill", call=2),
        *fault("before_join", 2, "hang", name="late", seconds=late)[1:],
        fork=True,
    )
    found = learned(killed)
    calm = learned(running(*APART, "network.publication=stream", fork=True))
    assert_equal(found, calm)
    events = killed.rows("events.jsonl")
    assert [row["by"] for row in events if row["kind"] == "publication"] == ["gloo broadcast"]
    (said,) = [
        row["message"]
        for row in events
        if row["kind"] == "warning" and "publication" in row["message"]
    ]
    assert "because rank 2 is gone" in said
    assert len(killed.summary["lost"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("schedule.async_steps=1", "schedule.gap=1", "schedule.stale_fraction=0.5"),
        ("allocation.trainers=2", "parallel.sharding=fsdp"),
        ("allocation.trainers=2", "schedule=gap_tsp_tag"),
    ],
)
def test_broadcasts_give_the_weights_that_streams_give(
    running: Any, words: tuple[str, ...]
) -> None:
    both = [
        learned(running(*APART, *words, f"network.publication={by}", fork=True))
        for by in ("broadcast", "stream")
    ]
    assert_equal(*both)


@pytest.mark.slow
@pytest.mark.parametrize("action", ["stop", "kill"])
def test_who_is_suspended_or_killed_at_the_first_broadcast_holds_nobody_up(
    running: Any, action: str
) -> None:
    struck = running(*APART, "network.publication=broadcast", *fault(TAKEN, 1, action), fork=True)
    calm = running(*APART, "network.publication=stream", fork=True)
    assert_equal(learned(struck), learned(calm))
    assert struck.summary["status"] == "completed"


# ---- bad input


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("network.publication=multicast",),
            "= multicast: is none of the choices; allowed: auto . stream . broadcast",
        ),
        (
            ("allocation.rollouts={min: 1, max: 2}",),
            "broadcast with allocation.rollouts = .* others are to join; set",
        ),
        (
            ("launch=ray",),
            "broadcast with launch = ray: .* set launch=local, or network.publication=stream",
        ),
    ],
)
def test_where_a_broadcast_cannot_be_is_said_in_one_message(
    words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        configuration.load(["experiment=digits_flowgrpo", "network.publication=broadcast", *words])


@pytest.mark.parametrize(
    ("hardware", "words", "chosen"),
    [("cpu", (), False), ("a100x32", (), True), ("a100x32", ("launch=ray",), False)],
)
def test_auto_broadcasts_between_gpus_alone(
    hardware: str, words: tuple[str, ...], chosen: bool
) -> None:
    words = (
        "experiment=sd35_flowgrpo",
        f"hardware={hardware}",
        "model.path=x",
        "network.publication=auto",
        *words,
    )
    composed = configuration.load(words)
    assert publishes_by_broadcast(composed.settings, 1) == chosen


@pytest.mark.parametrize("usual", [None, "1"])
def test_a_death_in_a_broadcast_does_not_end_trainer_0(
    usual: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's watchdog reads what to do when a group is made; 2: abort the communicator alone."""
    made: list[str | None] = []

    class Group:
        Options = SimpleNamespace

        def __init__(self, *arguments: Any) -> None:
            made.append(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"))

    if usual is None:
        monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    else:
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", usual)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(dist, "get_default_backend_for_device", lambda device: "nccl")
    store: Any = None
    broadcast._group_of(torch.device("cuda"), store, (0, 2), timedelta(seconds=1))
    assert made == ["2"]
    assert os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == usual


def test_a_member_that_dies_before_nccl_has_connected_is_waited_for_as_long_as_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL connects in its first operation, which blocks until every member makes it."""
    connected = threading.Event()
    group = SimpleNamespace(allreduce=lambda one: connected.wait())
    monkeypatch.setattr(broadcast, "_group_of", lambda *_: group)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    link: Any = SimpleNamespace(
        _audience=SimpleNamespace(ranks=(0, 1), store=dist.HashStore(), device=torch.device("cpu")),
        _rank=0, _stream=object(), _group=None, _check_members=lambda: None,
        _limits=SimpleNamespace(join_s=0.2, collective_s=9.0),
        _control=SimpleNamespace(check_abort=lambda: None),
    )  # fmt: skip
    for name in ("_create_group", "_wait_until", "_wait_for_members", "_complete_collective"):
        setattr(link, name, partial(getattr(BroadcastLink, name), link))
    try:
        with pytest.raises(broadcast._Over, match=r"come through for 0 s \(limits\.join_s\)"):
            BroadcastLink._form_group(link)
    finally:
        connected.set()
