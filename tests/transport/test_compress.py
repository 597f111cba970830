"""Slow connections carry less, and what arrives is the same to the bit."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks._throttle import Throttle
from benchmarks.publish import moved_on
from digenrl.cluster.control import Control
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.store import StoreClient, StoreServer
from digenrl.transport.compress import CodedLine
from digenrl.transport.difference import apply_difference, encode_difference
from digenrl.transport.link import PeerLine, SocketLink
from digenrl.transport.repeated import _REMEMBERED, Repeated
from digenrl.transport.weights import Arrivals, publish
from digenrl.transport.wire import Message, MessageKind, WireError

HOST, OURS = "127.0.0.1", Handshake("secret", seconds=2.0, waiting=8)
SLOW_BYTES_S = 20e6
NOWHERE: Any = None


def noise(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


# ---- differences


@pytest.mark.parametrize("size", [0, 2, 64, 1 << 16])
@pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
def test_a_difference_gives_the_bytes_back(size: int, share: float) -> None:
    base = noise(size, 0)
    data = torch.where(torch.rand(size) < share, noise(size, 1), base)
    payload, facts = encode_difference(data, base)
    assert torch.equal(apply_difference(payload, facts, base), data)
    assert share < 1 or len(payload) < 1.1 * size + 64


def test_weights_that_moved_a_little_take_a_tenth() -> None:
    before = {"w": torch.randn(1 << 18).bfloat16()}
    after = {"w": before["w"].clone()}
    moved_on(after, 0.05, torch.Generator().manual_seed(0))
    data, base = (held["w"].view(torch.uint8) for held in (after, before))
    payload, facts = encode_difference(data, base)
    assert len(payload) < 0.1 * len(data)
    assert torch.equal(apply_difference(payload, facts, base), data)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda payload, facts: (payload[:-8], facts),
        lambda payload, facts: (payload, facts | {"moved": facts["moved"] + 1}),
        lambda payload, facts: (payload, facts | {"where": 3}),
        lambda payload, facts: (noise(len(payload), 5), facts),
    ],
)
def test_a_spoilt_difference_is_refused(spoil: Callable[..., Any]) -> None:
    base, data = noise(4096, 0), noise(4096, 1)
    line = CodedLine()
    line._kept[0] = 1, base
    payload, facts = spoil(*encode_difference(data, base))
    coded = {"version": 2, "bucket": 0, "coded": facts | {"base": 1}}
    with pytest.raises(WireError, match="cannot be completed"):
        line.accept_incoming(Message(MessageKind.WEIGHTS, coded, {"data": payload}), NOWHERE)


def test_a_difference_to_a_version_that_is_not_held_is_refused() -> None:
    payload, facts = encode_difference(noise(64, 0), noise(64, 1))
    for kept in ({}, {0: (3, noise(64, 1))}):
        line = CodedLine()
        line._kept.update(kept)
        message = Message(
            MessageKind.WEIGHTS,
            {"version": 2, "bucket": 0, "coded": facts | {"base": 1}},
            {"data": payload},
        )
        with pytest.raises(WireError):
            line.accept_incoming(message, NOWHERE)


# ---- trajectories


def task(seed: int, prompt: int, steps: int = 3, chained: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    path = torch.randn(2, steps + 1, 4, generator=generator).bfloat16()
    after = path[:, 1:] if chained else torch.randn(2, steps, 4, generator=generator).bfloat16()
    return {
        "rewards/r": torch.full((2,), float(seed)),
        "latents": path[:, :-1],
        "next_latents": after,
        "condition/text": torch.full((1, 8, 4), float(prompt)),
        "condition/pooled": torch.full((1, 4), float(prompt)),
    }


def test_a_prompt_and_latents_travel_once() -> None:
    here, there = Repeated(), Repeated()
    for seed, prompt, expected in ((0, 0, 5), (1, 0, 3), (2, 1, 5), (3, 0, 3)):
        whole = task(seed, prompt)
        left, facts = here.drop_repeated(whole)
        assert len(left) == expected
        assert left["next_latents"].shape[1] == 1
        found = there.restore_repeated(left, facts)
        assert list(found) == list(whole)
        assert all(torch.equal(found[name], value) for name, value in whole.items())
        assert all(found[name].dtype == value.dtype for name, value in whole.items())


@pytest.mark.parametrize("steps", [1, 3])
def test_latents_of_steps_that_do_not_follow_each_other_travel_whole(steps: int) -> None:
    whole = task(0, 0, steps, chained=False)
    left, facts = Repeated().drop_repeated(whole)
    assert torch.equal(left["next_latents"], whole["next_latents"])
    found = Repeated().restore_repeated(left, facts)
    assert torch.equal(found["next_latents"], whole["next_latents"])


def test_both_ends_forget_alike() -> None:
    here, there = Repeated(), Repeated()
    prompts = [*range(_REMEMBERED), 0, 3, *range(40), 1, 0, 39]
    for seed, prompt in enumerate(prompts):
        whole = task(seed, prompt)
        found = there.restore_repeated(*here.drop_repeated(whole))
        assert all(torch.equal(found[name], value) for name, value in whole.items())
        assert list(here._known) == list(there._known)
        assert len(here._known) <= _REMEMBERED


# ---- connections


class Pair:
    """A sender, a line of some speed, and a receiver."""

    def __init__(self, bytes_s: float, line: Callable[[], PeerLine]) -> None:
        self.server = StoreServer(socket.create_server((HOST, 0)), OURS)
        self.lines: list[PeerLine] = []

        def kept(peer: int) -> PeerLine:
            self.lines.append(line())
            return self.lines[-1]

        controls = [Control(StoreClient(HOST, self.server.port, OURS), rank) for rank in range(2)]
        self.receiver = SocketLink(controls[1], 1, HOST, OURS, lines=kept)
        port = int((controls[0].get("address/1") or "").rpartition(":")[2])
        self.throttle = Throttle(HOST, port, bytes_s)
        controls[0].set("address/1", f"{HOST}:{self.throttle.port}")
        self.sender = SocketLink(controls[0], 0, HOST, OURS, lines=kept)

    def bytes_of(self, send: Callable[[], object], arrived: Callable[[], bool]) -> int:
        before, deadline = self.throttle.carried, time.monotonic() + 30.0
        send()
        while not arrived():
            assert time.monotonic() < deadline
        return self.throttle.carried - before

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self.throttle.close()
        self.server.close()


@pytest.fixture
def pair() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(bytes_s: float, line: Callable[[], PeerLine] = CodedLine) -> Pair:
        made.append(Pair(bytes_s, line))
        return made[-1]

    yield make
    for each in made:
        each.close()


class SlowCodec(CodedLine):
    """A line of a machine whose codec is slower than the connection."""

    def __init__(self) -> None:
        super().__init__()
        self.codec_speed = 1.0


@pytest.mark.parametrize(
    ("line", "coded"), [(CodedLine, True), (SlowCodec, False), (PeerLine, False)]
)
def test_versions_arrive_bit_for_bit_and_a_slow_line_carries_their_difference(
    pair: Callable[..., Pair], line: type[PeerLine], coded: bool
) -> None:
    """One version is published twice, as a recall does, and one has negative number (of an
    evaluation)."""
    run, generator = pair(SLOW_BYTES_S, line), torch.Generator().manual_seed(0)
    weights = {name: torch.randn(1 << 21, generator=generator).bfloat16() for name in "abc"}
    arrivals, size = Arrivals({name: value.clone() for name, value in weights.items()}), 12 << 20
    found: list[Any] = []

    def arrived() -> bool:
        message = run.receiver.receive(0.5)
        version = None if message is None else arrivals.add_message(message)
        found.append(version)
        return version is not None

    for number in (1, 2, 3, 2, 3, -4, 4):
        moved_on(weights, 0.05, generator)
        carried = run.bytes_of(
            lambda n=number: publish(n, weights, run.sender, {1: ()}, lambda digest: None), arrived
        )
        assert found[-1].number == number
        assert all(torch.equal(found[-1].tensors[name], value) for name, value in weights.items())
        if number in (1, -4) or not coded:
            assert carried >= size
        else:
            assert carried < size / 8
    if not coded:
        assert not any(each._kept for each in run.lines if isinstance(each, CodedLine))


def test_trajectories_of_a_slow_line_arrive_whole(pair: Callable[..., Pair]) -> None:
    run, carried = pair(SLOW_BYTES_S), list[int]()
    latents = torch.randn(2, 9, 1 << 16).bfloat16()
    for number in range(3):
        tensors = {
            "latents": latents[:, :-1] + number,
            "next_latents": latents[:, 1:] + number,
            "condition/text": torch.ones(1 << 20),
        }
        message = Message(MessageKind.CELLS, {"number": number}, tensors)
        got: list[Message] = []

        def arrived(got: list[Message] = got) -> bool:
            message = run.receiver.receive(0.5)
            got += [] if message is None else [message]
            return bool(got)

        carried.append(run.bytes_of(lambda m=message: run.sender.send(1, m), arrived))
        assert got[0].meta == {"number": number}
        assert all(torch.equal(got[0].tensors[name], value) for name, value in tensors.items())
    whole = sum(value.nbytes for value in tensors.values())
    assert carried[0] >= whole
    assert carried[1] < whole - latents[:, 1:-1].nbytes + 4096, "latents travel once"
    assert carried[2] < carried[1] - tensors["condition/text"].nbytes + 4096, "and a prompt does"


def test_where_the_system_does_not_tell_the_speed_nothing_is_coded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("digenrl.transport.compress._unconfirmed_bytes", lambda sock: None)
    line, weights = CodedLine(), Message(MessageKind.WEIGHTS, {"version": 1, "digest": "x"})
    bucket = replace(weights, meta={"version": 1, "bucket": 0}, tensors={"data": noise(64, 0)})
    for message in (bucket, weights):
        line.note_written(line.prepare_outgoing(message), socket.socket())
    assert not line.coding
    assert line.prepare_outgoing(bucket) is bucket
