"""Weights on their way from a trainer to a rollout rank: whole, of one version, and bit for bit, or
refused."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from digenrl.cluster.control import Control
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.network import Network
from digenrl.cluster.store import StoreClient, StoreServer
from digenrl.strategy.gradients import assert_equal_digests
from digenrl.transport import link as sockets
from digenrl.transport import weights as module
from digenrl.transport.link import Routes, SocketLink
from digenrl.transport.weights import (
    Arrivals,
    Version,
    WeightsError,
    adopt,
    compute_digest,
    exchanged_values,
    layout_digest,
    plan_buckets,
    publish,
    take_part,
)
from digenrl.transport.wire import Message, MessageKind, decode, encode
from tests.models.tiny_policies import make, randomise_lora
from tests.namespaces import bytes_sent, inside, two_machines
from tests.transport.test_wire import reader

HOST = "127.0.0.1"
TO_1: dict[int, list[int]] = {1: []}
MIB = 1 << 20


class Wire:
    """A link that keeps the bytes of every message, for the test to deliver."""

    def __init__(self) -> None:
        self.sent: list[bytearray] = []

    def send(self, peer: int, message: Message) -> None:
        self.sent.append(bytearray(b"".join(bytes(buffer) for buffer in encode(message))))

    def multicast(self, routes: Routes, message: Message) -> None:
        for peer in routes:
            self.send(peer, message)

    def receive(self, timeout: float) -> Message | None:
        return None

    def drain(self) -> None:
        return None

    def close(self) -> None:
        return None


def weights(scale: float = 1.0, megabytes: int = 5) -> dict[str, Tensor]:
    """Several buckets; odd sizes, an empty tensor, a transposed one and four dtypes."""
    generator = torch.Generator().manual_seed(7)
    return {
        "a": torch.randn(3, 2, generator=generator) * scale,
        "b": torch.randn(megabytes * MIB // 4, generator=generator).mul_(scale),
        "c": torch.zeros(0, 3),
        "d": (torch.randn(5, 7, generator=generator) * scale).to(torch.bfloat16).T,
        "e": torch.randn(1, 1, 9, generator=generator).double() * scale,
        "f": torch.arange(5),
    }


def published(parameters: Mapping[str, Tensor], number: int = 3) -> tuple[Version, list[bytearray]]:
    wire = Wire()
    return publish(number, parameters, wire, TO_1, lambda digest: None), wire.sent


def delivered(arrivals: Arrivals, messages: list[bytearray]) -> list[Version | None]:
    return [arrivals.add_message(decode(reader(bytes(message)), 1 << 24)) for message in messages]


def test_a_version_arrives_bit_for_bit_with_its_seal_and_not_before() -> None:
    sent, own = weights(0.1), weights(0.0)
    version, messages = published(sent)
    assert len(messages) == len(plan_buckets(sent)) + 1 > 2
    *before, arrived = delivered(Arrivals(own), messages)
    assert before == [None] * len(before)
    assert arrived is not None
    assert (arrived.number, arrived.digest) == (3, version.digest)
    kept = {name: own[name] for name in own}
    adopt(own, arrived)
    for name, value in sent.items():
        assert kept[name] is own[name], "a module would not see the new weights"
        assert (own[name].shape, own[name].dtype) == (value.shape, value.dtype)
        assert torch.equal(own[name], value)
        assert torch.equal(version.tensors[name], value)


@pytest.mark.parametrize(
    ("mebibytes", "wanted"),
    [
        ([3, 1, 1, 5, 2], [4, 1, 5, 2]),
        ([4, 4, 0.25], [4, 4, 0.25]),
        ([1] * 262, [8] * 32 + [6]),
        ([1] * 64, [4] * 16),
        ([1] * 256, [4] * 64),
        ([1] * 257, [8] * 32 + [1]),
        ([100, 1, 1], [100, 2]),
        ([], [0]),
    ],
)
def test_buckets_are_filled_up_to_a_power_of_two(
    mebibytes: list[float], wanted: list[float]
) -> None:
    """4 MiB, or as many as make at most 128 buckets of twice the size."""
    parameters = {
        f"p{number}": torch.empty(int(size * MIB), dtype=torch.uint8, device="meta")
        for number, size in enumerate(mebibytes)
    }
    plan = plan_buckets(parameters)
    assert [bucket.size / MIB for bucket in plan] == wanted
    assert [name for bucket in plan for name in bucket.starts] == list(parameters)


def test_adopted_weights_keep_the_dtype_and_the_layout_of_the_rank() -> None:
    """Equal ones are taken over without a copy; others are copied into what is there."""
    values = {name: torch.arange(12.0).view(3, 4) + n for n, name in enumerate("abc")}
    own = {"a": torch.zeros(3, 4), "b": torch.zeros(3, 4), "c": torch.zeros(4, 3).t()}
    kept = dict(own)
    adopt(own, Version(1, "", values | {"b": values["b"].bfloat16()}))
    for name, value in values.items():
        assert own[name] is kept[name]
        assert own[name].dtype == torch.float32
        assert torch.equal(own[name], value)
    assert own["a"].data_ptr() == values["a"].data_ptr()
    assert own["b"].data_ptr() != values["b"].data_ptr()
    assert own["c"].stride() == (1, 3)


def test_copies_to_a_device_are_waited_for_once_for_all() -> None:
    asked: list[Any] = []

    class Asked(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function is Tensor.copy_:
                asked.append(kwargs)
            return function(*args, **(kwargs or {}))

    own = {name: torch.zeros(2) for name in "ab"}
    with Asked():
        adopt(own, Version(1, "", {name: torch.ones(2).double() for name in "ab"}))
    assert asked == [{"non_blocking": True}] * 2


def test_an_exchange_gives_both_versions_back_bit_for_bit() -> None:
    own, other = weights(0.1), weights(0.2)
    _, messages = published(other)
    arrived = delivered(Arrivals(own), messages)[-1]
    assert arrived is not None
    for _ in range(2):
        with exchanged_values(own, arrived.tensors):
            assert all(torch.equal(own[name], value) for name, value in other.items())
        assert all(torch.equal(own[name], value) for name, value in weights(0.1).items())


class Elsewhere(Tensor):
    """A tensor that says that it lies on another device."""

    device = torch.device("meta")  # type: ignore[assignment]


@pytest.mark.parametrize("there", [False, True])
def test_an_exchange_needs_no_third_copy_and_crosses_devices(there: bool) -> None:
    own, other = {"w": torch.zeros(3)}, {"w": torch.ones(3)}
    places = own["w"].data_ptr(), other["w"].data_ptr()
    values = {"w": other["w"].as_subclass(Elsewhere)} if there else other
    with exchanged_values(own, values):
        assert own["w"].tolist() == [1.0] * 3
        assert own["w"].data_ptr() == places[not there]
        assert not there or other["w"].tolist() == [0.0] * 3
    assert own["w"].tolist() == [0.0] * 3
    assert own["w"].data_ptr() == places[0]
    assert other["w"].tolist() == [1.0] * 3


def test_the_copy_is_complete_when_publish_returns() -> None:
    parameters = weights(0.1)
    expected = {name: value.clone() for name, value in parameters.items()}
    version, messages = published(parameters)
    for value in parameters.values():
        value.zero_()
    arrived = delivered(Arrivals(parameters), messages)[-1]
    assert arrived is not None
    for name, value in expected.items():
        assert torch.equal(arrived.tensors[name], value)
        assert torch.equal(version.tensors[name], value)


def test_tensors_lie_where_torch_would_put_them() -> None:
    """Kernels may take another path, with another rounding, for memory that is aligned
    otherwise."""
    version, messages = published(weights())
    arrived = delivered(Arrivals(weights()), messages)[-1]
    assert arrived is not None
    assert not [
        name
        for name, value in [*version.tensors.items(), *arrived.tensors.items()]
        if value.data_ptr() % 64
    ]


@pytest.mark.parametrize(("message", "position"), [(0, -1), (1, -70), (1, 200_000)])
def test_one_flipped_bit_raises_and_leaves_the_weights_alone(message: int, position: int) -> None:
    own = weights(0.0)
    version, messages = published(weights(0.1))
    messages[message][position] ^= 1
    with pytest.raises(
        WeightsError, match=f"version 3 arrived with digest .* sent as {version.digest}"
    ):
        delivered(Arrivals(own), messages)
    assert torch.equal(own["a"], torch.zeros(3, 2))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_bucket_is_noticed(lost: int) -> None:
    _, messages = published(weights(0.1))
    del messages[lost]
    with pytest.raises(WeightsError, match="version 3"):
        delivered(Arrivals(weights()), messages)


@pytest.mark.parametrize("wrong", ["late", "early", "none", "short", "beyond"])
def test_a_bucket_that_is_not_the_next_one_is_refused_when_it_comes(wrong: str) -> None:
    """Not only when the version is complete: nothing would tell which bucket it was."""
    sent = weights(0.1)
    *parts, _ = [decode(reader(bytes(each)), 1 << 24) for each in published(sent)[1]]
    first, place = parts[0], len(parts) if wrong == "beyond" else 0
    changed = {
        "late": replace(first, meta={**first.meta, "bucket": 1}),
        "early": parts[1],
        "none": replace(first, tensors={}),
        "short": replace(first, tensors={"data": first.tensors["data"][:-1]}),
        "beyond": replace(first, meta={**first.meta, "bucket": place}),
    }
    arrivals = Arrivals(sent)
    for part in parts[:place]:
        assert arrivals.add_message(part) is None
    with pytest.raises(WeightsError, match=f"bucket .* came where {place} was expected"):
        arrivals.add_message(changed[wrong])


def test_all_ways_of_taking_part_gather_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathering shards is a collective. A trainer that gathers in another order makes the others
    wait."""
    gathered: list[Tensor] = []
    monkeypatch.setattr(
        module, "_whole_parameter", lambda value: gathered.append(value) or value.detach()
    )
    sent, orders = weights(), []
    for take in (
        lambda: publish(3, sent, Wire(), TO_1, lambda digest: None),
        lambda: compute_digest(sent, sent),
        lambda: take_part(sent),
    ):
        take()
        orders.append([id(value) for value in gathered])
        gathered.clear()
    assert orders == [[id(value) for value in sent.values()]] * 3


def test_buckets_of_two_versions_never_make_one() -> None:
    arrivals = Arrivals(weights())
    (_, old), (_, new) = published(weights(0.1), 3), published(weights(0.2), 4)
    with pytest.raises(WeightsError, match="version 4 arrived with digest"):
        delivered(arrivals, [old[0], *new[1:]])


@pytest.mark.parametrize(
    "change",
    [
        lambda t: {name: t[name] for name in "abcde"},
        lambda t: {"b": t["b"], "a": t["a"]} | {name: t[name] for name in "cdef"},
        lambda t: t | {"b": t["b"].half()},
        lambda t: t | {"b": t["b"][None]},
        lambda t: {name.replace("f", "g"): value for name, value in t.items()},
    ],
    ids=["missing", "order", "dtype", "shape", "name"],
)
def test_a_table_mismatch_raises(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    sent = change(weights())
    assert layout_digest(sent) != layout_digest(weights())
    with pytest.raises(WeightsError, match="version 3 do not fit this rank"):
        delivered(Arrivals(weights()), published(sent)[1])


def test_trainers_that_disagree_publish_nothing_that_could_be_adopted() -> None:
    wire = Wire()

    def disagree(digest: str) -> None:
        raise WeightsError("trainers hold different weights")

    with pytest.raises(WeightsError, match="different weights"):
        publish(3, weights(), wire, TO_1, disagree)
    assert delivered(Arrivals(weights()), wire.sent) == [None] * len(plan_buckets(weights()))
    assert_equal_digests("0" * 16, 1, 3)  # one trainer agrees with itself


@contextmanager
def slow_line(port: int, bytes_per_second: float, opened: threading.Event) -> Iterator[str]:
    """Address of a proxy that passes bytes on to `port` at this speed, once it is opened."""
    with socket.create_server((HOST, 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)

        def carry() -> None:
            inbound, _ = server.accept()
            opened.wait(30.0)
            with inbound, socket.create_connection((HOST, port)) as outbound:
                answers = threading.Thread(target=carry_back, args=(outbound, inbound))
                answers.start()
                while data := inbound.recv(1 << 16):
                    outbound.sendall(data)
                    time.sleep(len(data) / bytes_per_second)
                outbound.shutdown(socket.SHUT_WR)
                answers.join()

        def carry_back(outbound: socket.socket, inbound: socket.socket) -> None:
            while data := outbound.recv(1 << 16):
                inbound.sendall(data)

        thread = threading.Thread(target=carry)
        thread.start()
        yield f"{HOST}:{server.getsockname()[1]}"
        thread.join(timeout=30.0)


def test_slow_link_and_fast_trainer_every_version_arrives_as_it_was_published() -> None:
    """The trainer steps on while all four versions are still on the line; each is adopted bit for
    bit."""
    handshake = Handshake()
    store = StoreServer(socket.create_server((HOST, 0)), handshake)
    controls = [
        Control(StoreClient(HOST, store.port, handshake), rank, patience=10.0) for rank in range(2)
    ]
    trainer, rollout = (
        SocketLink(control, rank, HOST, handshake) for rank, control in enumerate(controls)
    )
    address = controls[0].get("address/1")
    assert address is not None
    parameters = {"w": torch.zeros(MIB // 4), "v": torch.zeros(100)}
    own = {name: torch.full_like(value, -1.0) for name, value in parameters.items()}
    arrivals = Arrivals(own)
    try:
        opened = threading.Event()
        with slow_line(int(address.rsplit(":", 1)[1]), 4 * MIB, opened) as proxy:
            controls[0].set("address/1", proxy)
            expected = []
            for number in range(4):
                for value in parameters.values():
                    value.copy_(
                        torch.randn(value.shape, generator=torch.Generator().manual_seed(number))
                    )
                expected.append({name: value.clone() for name, value in parameters.items()})
                publish(number, parameters, trainer, TO_1, lambda digest: None)
            opened.set()  # so far nothing could pass: the trainer has waited for nobody
            for number in range(4):
                version = None
                while version is None:
                    message = rollout.receive(10.0)
                    assert message is not None, "nothing arrived"
                    assert message.kind is MessageKind.WEIGHTS
                    version = arrivals.add_message(message)
                adopt(own, version)
                assert version.number == number
                assert all(
                    torch.equal(own[name], value) for name, value in expected[number].items()
                )
            trainer.close()
    finally:
        trainer.close()
        rollout.close()
        store.close()


def narrow(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters as a rank that computes in 16 bits holds them."""
    cast = {torch.float32: torch.bfloat16}
    return {
        name: torch.empty(value.shape, dtype=cast.get(value.dtype, value.dtype), device="meta")
        for name, value in parameters.items()
    }


def test_what_rollouts_hold_in_16_bit_travels_in_16_bit() -> None:
    """The wire carries half the bytes, rounded as the cast of each forward rounds."""
    sent = weights(0.1)
    like = narrow(sent)
    wire = Wire()
    version = publish(3, sent, wire, TO_1, lambda digest: None, like)
    own = {name: torch.empty_like(value, device="cpu") for name, value in like.items()}
    arrived = delivered(Arrivals(own), wire.sent)[-1]
    assert arrived is not None
    adopt(own, arrived)
    for name, value in sent.items():
        assert torch.equal(own[name], value.to(own[name].dtype)), name
    exact = sum(value.numel() * value.element_size() for value in like.values())
    assert exact <= sum(map(len, wire.sent)) < 1.01 * exact + 4096
    assert version.digest == compute_digest(sent, like)


def test_trainers_that_send_nothing_hold_nothing() -> None:
    """The same digest as the sender's, a piece at a time; also of tensors that fill no whole
    piece."""
    sent = weights(0.1, megabytes=40)
    assert compute_digest(sent, sent) == published(sent)[0].digest
    large = {"w": torch.zeros(MIB).expand(256, MIB)}  # 1 GiB to look at
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    state, like = (
        {"w": large["w"][:64]},
        {"w": torch.empty(64, MIB, dtype=torch.bfloat16, device="meta")},
    )
    compute_digest(state, like)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10, (
        "it grows with the version"
    )


def test_the_weights_that_a_run_begins_with_are_not_sent() -> None:
    sent = weights(0.1)
    wire = Wire()
    version = publish(0, sent, wire, TO_1, lambda digest: None, there=True)
    (message,) = wire.sent
    assert len(message) < 1024
    own = weights(0.1)
    (arrived,) = delivered(Arrivals(own), [message])
    assert arrived is not None
    assert arrived.digest == version.digest
    adopt(own, arrived)
    assert all(torch.equal(own[name], value) for name, value in sent.items())
    with pytest.raises(WeightsError, match=r"begins with other weights .* model\.path"):
        delivered(Arrivals(weights(0.2)), [message])


def test_a_version_crosses_to_each_node_once_and_is_passed_on_inside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three nodes by their addresses: the trainer with rollout 1, rollouts 2 and 3, rollout 4. A
    rank passes on without being asked to receive. Each connection carries one version, and headers.
    """
    written, write = Counter[str](), sockets._write_buffers

    def counted(sock: socket.socket, buffers: Any) -> None:
        written[threading.current_thread().name] += sum(len(buffer) for buffer in buffers)
        write(sock, buffers)

    monkeypatch.setattr(sockets, "_write_buffers", counted)
    hosts = ["127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.2", "127.0.0.3"]
    ours = Handshake()
    store = StoreServer(socket.create_server((HOST, 0)), ours)
    controls = [
        Control(StoreClient(HOST, store.port, ours), rank, patience=10.0)
        for rank in range(len(hosts))
    ]
    links = [SocketLink(control, rank, hosts[rank], ours) for rank, control in enumerate(controls)]
    sent = weights(0.1)
    try:
        publish(3, sent, links[0], {1: [], 2: [3], 4: []}, lambda digest: None)
        assert sorted(links[0]._outboxes) == [1, 2, 4]
        for rank in (3, 1, 4, 2):
            arrivals, version = Arrivals(weights()), None
            while version is None:
                message = links[rank].receive(10.0)
                assert message is not None, f"nothing came to rank {rank}"
                version = arrivals.add_message(message)
            assert all(torch.equal(version.tensors[name], value) for name, value in sent.items())
        assert sorted(links[2]._outboxes) == [3]
        size = sum(bucket.size for bucket in plan_buckets(sent))
        assert set(written) == {f"link-to-{rank}" for rank in (1, 2, 3, 4)}
        assert all(size <= count <= size + 2000 for count in written.values()), (size, written)
    finally:
        for link in links:
            link.close()
        store.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora", [{"rank": 64, "alpha": 64, "targets": "attention_ff"}, "full"], ids=["lora", "all"]
)
def test_a_version_goes_over_the_cable_once_in_the_dtype_of_the_rollouts(lora: Any) -> None:
    """The trainer and rollout 1 on one machine, rollouts 2 and 3 on the other; the kernel counts
    the bytes. Beside the version they are headers, and answers of the store."""
    trainer, rollout = (make("flux", lora, dtype="bfloat16") for _ in range(2))
    randomise_lora(trainer)
    rollout.adapter.only_generate()
    source, like = trainer.adapter.trained_parameters(), trainer.adapter.generating_parameters()
    size = sum(bucket.size for bucket in plan_buckets(like))
    assert size < 0.6 * sum(4 * value.numel() for value in source.values())
    with two_machines() as (here, there):
        places, ours = (
            [(here, "fd77::1"), (here, "fd77::1"), (there, "fd77::2"), (there, "fd77::2")],
            Handshake(),
        )
        store = inside(here, lambda: StoreServer(Network().open_listener("fd77::1"), ours))

        def join(rank: int, host: str) -> SocketLink:
            control = Control(StoreClient(store.host, store.port, ours), rank, patience=10.0)
            return SocketLink(control, rank, host, ours)

        links = [
            inside(machine, partial(join, rank, host))
            for rank, (machine, host) in enumerate(places)
        ]
        try:
            before = bytes_sent(here, "data0")
            to: dict[int, list[int]] = {1: [], 2: [3]}
            made = inside(here, lambda: publish(1, source, links[0], to, lambda digest: None, like))
            for link in links[1:]:
                arrivals, version = Arrivals(rollout.adapter.trained_parameters()), None
                while version is None:
                    message = link.receive(20.0)
                    assert message is not None
                    version = arrivals.add_message(message)
                assert version.digest == made.digest
            sent = bytes_sent(here, "data0") - before
            assert size <= sent <= 1.05 * size + 20_000, f"{sent} bytes for a version of {size}"
        finally:
            for link in links:
                link.close()
            store.close()
