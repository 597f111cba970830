"""Thin lines: fewer bytes, the same version; by what the profile says, or by what a line was seen
to carry."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.cluster.control import Control
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.store import StoreClient, StoreServer
from digenrl.extensions.links.thin import ThinLine, ThinSettings, said_mb_s
from digenrl.transport import link as sockets
from digenrl.transport.link import SocketLink
from digenrl.transport.weights import Arrivals, Version, adopt, buckets, publish
from digenrl.transport.wire import Message, MessageKind, WireError, decode, on_host
from tests.transport.test_weights import HOST, MIB, TO_1, Wire, slow_line, weights
from tests.transport.test_wire import reader, written

DELTAS = ThinSettings(delta=True, compress=False)


class Connection(Wire):
    """A link of one connection: its two lines, and the bytes of every message between them."""

    def __init__(self, settings: ThinSettings = DELTAS) -> None:
        super().__init__()
        self.near, self.far = ThinLine(settings), ThinLine(settings)
        self.read: list[Message] = []

    def send(self, peer: int, message: Message) -> None:
        self.sent.append(bytearray(written(self.near.outgoing(on_host(message)))))

    def arrived(self, arrivals: Arrivals) -> list[Version]:
        """The versions that what was sent since the last call completes."""
        found, self.sent = (
            [self.far.incoming(decode(reader(bytes(each)), 1 << 24)) for each in self.sent],
            [],
        )
        self.read += found
        return [version for each in found if (version := arrivals.add(each)) is not None]

    def publish(self, number: int, parameters: Mapping[str, Tensor]) -> int:
        """Send a version; the bytes that it takes."""
        publish(number, parameters, self, TO_1, lambda digest: None)
        return sum(map(len, self.sent))


def stepped(old: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights after an optimizer step: some values have moved a little."""
    new = {name: value.clone() for name, value in old.items()}
    new["b"][::50] *= 1.001
    new["f"][2] = 9
    return new


def assert_same(found: Version, wanted: Mapping[str, Tensor]) -> None:
    assert all(torch.equal(found.tensors[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("adopted", [True, False], ids=["in use", "still waiting"])
def test_deltas_make_the_same_versions_in_few_bytes(adopted: bool) -> None:
    """Three versions; every fifth one is whole. The messages show nothing of it."""
    connection, own, now = (
        Connection(ThinSettings(delta=True, compress=False, whole_every=5)),
        weights(0.0),
        weights(0.1),
    )
    arrivals, sizes, before = Arrivals(own), [], None
    for number in (3, 4, 5, 6):
        sizes.append(connection.publish(number, now))
        (version,) = connection.arrived(arrivals)
        assert version.number == number
        assert_same(version, now)
        if before is not None:
            assert_same(before[0], before[1])  # its bytes are in use
        if adopted:
            adopt(own, version)
        before, now = (version, now), stepped(now)
    assert sizes[0] > 5 * MIB
    assert sizes[1] < 0.1 * sizes[0]
    assert sizes[2] > 0.9 * sizes[0]
    assert sizes[3] < 0.1 * sizes[0]
    assert {key for message in connection.read for key in message.meta} <= {
        "version",
        "table",
        "bucket",
        "digest",
    }


def test_weights_of_an_evaluation_travel_whole_and_are_no_base() -> None:
    connection, old, average = Connection(), weights(0.1), weights(0.05)
    arrivals = Arrivals(weights(0.0))
    connection.publish(3, old)
    whole = connection.publish(-3, average) / 2
    new = stepped(old)
    three, evaluated = connection.arrived(arrivals)
    assert connection.publish(4, new) < 0.1 * whole
    (four,) = connection.arrived(arrivals)
    assert_same(three, old)
    assert_same(evaluated, average)
    assert_same(four, new)


def test_a_version_that_never_ended_and_a_line_that_changes_leave_both_ends_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Version 4 stops half way; in version 6 the line is no longer thin, half way through version 8
    it is again."""
    connection, now = Connection(), weights(0.1, megabytes=9)
    count = len(buckets(now))
    assert count > 2

    def stop(digest: str) -> None:
        raise KeyboardInterrupt

    connection.publish(3, now)
    with pytest.raises(KeyboardInterrupt):
        publish(4, stepped(now), connection, TO_1, stop)
    arrivals = Arrivals(weights(0.0, megabytes=9))
    connection.arrived(arrivals)
    arrivals = Arrivals(weights(0.0, megabytes=9))  # trainer 0 began again
    for number in range(5, 11):
        thin = iter([number not in (6, 7, 8)] * 1 + [number not in (6, 7)] * count)
        monkeypatch.setattr(ThinSettings, "sends_deltas", lambda self, _, thin=thin: next(thin))
        now = stepped(now)
        connection.publish(number, now)
        (version,) = connection.arrived(arrivals)
        assert_same(version, now)


def test_a_delta_of_a_version_that_is_not_there_is_refused() -> None:
    connection, old = Connection(), weights(0.1)
    connection.publish(3, old)
    connection.sent.clear()
    connection.publish(4, stepped(old))
    with pytest.raises(
        WireError, match="version 4 came as a delta of version 3, which this rank does not hold"
    ):
        connection.arrived(Arrivals(weights()))


def test_a_relay_passes_whole_buckets_on() -> None:
    """What follows a delta on the next connection is that connection's business."""
    first, second, now = (
        Connection(),
        Connection(ThinSettings(delta=False, compress=False)),
        weights(0.1),
    )
    arrivals = Arrivals(weights(0.0))
    for number in (3, 4):
        first.publish(number, now)
        first.read.clear()
        first.arrived(Arrivals(weights(0.0)))
        for message in first.read:
            second.send(2, message)
        (version,) = second.arrived(arrivals)
        assert_same(version, now)
        now = stepped(now)


def test_the_profile_says_which_lines_are_thin() -> None:
    figures = {
        "memory_gib": 80,
        "tflops": 989,
        "hbm_tb_s": 3,
        "intra_gb_s": 9,
        "inter_gb_s": 9,
        "count": 2,
    }
    node: dict[str, Any] = {
        "pools": {"p": {"gpu": "H100"} | figures, "far": {"gpu": "H100"} | figures}
    }
    assert said_mb_s(node, 1, 2, 0) == ()
    node["links"] = {"wan": {"between": ["p", "far"], "gb_s": 0.5}}
    assert said_mb_s(node, 1, 2, 0) == (math.inf, 500.0, 500.0)
    assert said_mb_s(node, 1, 2, 7) == (500.0, math.inf, math.inf), (
        "who joined stands where the last rollout does"
    )
    cells = Message(MessageKind.CELLS, {}, {"x": torch.zeros(1 << 12)})
    assert ThinLine(ThinSettings(thin_mb_s=400.0), 500.0).outgoing(cells) is cells
    assert len(written(ThinLine(ThinSettings(thin_mb_s=600.0), 500.0).outgoing(cells))) < 0.1 * len(
        written(cells)
    )
    assert ThinLine(ThinSettings(compress=False, thin_mb_s=600.0), 500.0).outgoing(cells) is cells


@pytest.mark.processes
def test_a_line_that_is_seen_to_carry_little_counts_as_thin_and_packs() -> None:
    handshake, made = Handshake(), dict[tuple[int, int], list[ThinLine]]()

    def line(rank: int, peer: int) -> ThinLine:
        made.setdefault((rank, peer), []).append(ThinLine(ThinSettings()))
        return made[rank, peer][-1]

    store = StoreServer(socket.create_server((HOST, 0)), handshake)
    controls = [
        Control(StoreClient(HOST, store.port, handshake), rank, patience=10.0) for rank in range(2)
    ]
    sender, receiver = (
        SocketLink(control, rank, HOST, handshake, lines=partial(line, rank))
        for rank, control in enumerate(controls)
    )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sockets._BUFFER)
        size = 9 * probe.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 4
    zeros, seconds = Message(MessageKind.CELLS, {}, {"x": torch.zeros(size, dtype=torch.uint8)}), []
    opened = threading.Event()
    opened.set()
    try:
        address = str(controls[0].get("address/1"))
        with slow_line(int(address.rsplit(":", 1)[1]), 24 * MIB, opened) as proxy:
            controls[0].set("address/1", proxy)
            for thin in (False, True):
                assert any(each.thin for each in made.get((0, 1), ())) == thin
                began = time.monotonic()
                sender.send(1, zeros)
                message = receiver.receive(30.0)
                seconds.append(time.monotonic() - began)
                assert message is not None
                assert torch.equal(message.tensors["x"], zeros.tensors["x"])
            assert seconds[1] < 0.5 * seconds[0]
            assert not any(each.thin for each in made[1, 0]), "the receiver has sent nothing"
            sender.close()
    finally:
        sender.close()
        receiver.close()
        store.close()
