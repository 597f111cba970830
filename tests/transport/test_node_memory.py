"""Ranks of one machine map one copy of a version, and get the same bits as over a socket."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks._throttle import Throttle
from digenrl.cluster.control import Control
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.store import StoreClient, StoreServer
from digenrl.cluster.world import Session, World
from digenrl.transport import node_memory
from digenrl.transport.lines import chosen_lines
from digenrl.transport.link import SocketLink
from digenrl.transport.weights import Arrivals, Version, publish
from tests.strategy.processes import completed, configured, run_cluster
from tests.strategy.test_equality import LIGHT

HOST, OURS = "127.0.0.1", Handshake("secret", seconds=2.0, waiting=8)
SIZE = 12 << 20


def weights(scale: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(1 << 20, generator=generator) * scale for name in "abc"}


class Machine:
    """A sender and two receivers; what the first receives over its socket is counted."""

    def __init__(self) -> None:
        self.server = StoreServer(socket.create_server((HOST, 0)), OURS)
        controls = [Control(StoreClient(HOST, self.server.port, OURS), rank) for rank in range(3)]
        self.links: dict[int, SocketLink] = {}
        for rank in (2, 1, 0):
            lines = chosen_lines(controls[rank], rank, compress=True)
            self.links[rank] = SocketLink(controls[rank], rank, HOST, OURS, lines=lines)
        port = int((controls[0].get("address/1") or "").rpartition(":")[2])
        self.throttle = Throttle(HOST, port, 20e9)
        controls[0].set("address/1", f"{HOST}:{self.throttle.port}")
        self.arrivals = {rank: Arrivals(weights(0.0)) for rank in (1, 2)}

    def publish(self, number: int) -> Version:
        return publish(number, weights(number), self.links[0], {1: (), 2: ()}, lambda digest: None)

    def arrived(self, rank: int) -> Version:
        while True:
            message = self.links[rank].receive(20.0)
            assert message is not None
            assert node_memory.SHARED not in message.meta
            if (version := self.arrivals[rank].add_message(message)) is not None:
                return version

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        self.throttle.close()
        self.server.close()


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    yield made
    made.close()


def shared_memory() -> set[int]:
    """Inodes of the shared memory that this process holds open."""
    gc.collect()
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if "digenrl-weights" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(os.stat(f"/proc/self/fd/{name}").st_ino)
    return found


def test_ranks_of_a_machine_map_one_copy_of_a_version(machine: Machine) -> None:
    for number in (1, 2, 3):
        sent = machine.publish(number)
        for rank in (1, 2):
            found = machine.arrived(rank)
            assert (found.number, found.digest) == (sent.number, sent.digest)
            assert all(
                torch.equal(found.tensors[name], value) for name, value in sent.tensors.items()
            )
        assert len(shared_memory()) == 3, "a bucket each, of the newest version alone"
    most = 1.5 * SIZE  # all of version 1, if it came before the second receiver
    assert machine.throttle.carried < most


def test_what_one_rank_writes_no_other_sees(machine: Machine) -> None:
    sent = machine.publish(1)
    one, other = machine.arrived(1), machine.arrived(2)
    one.tensors["a"].zero_()
    assert torch.equal(other.tensors["a"], sent.tensors["a"])
    machine.publish(2)
    assert torch.equal(machine.arrived(2).tensors["a"], 2 * sent.tensors["a"])


def test_who_cannot_map_gets_the_bytes(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*place: int) -> Tensor:
        raise PermissionError

    monkeypatch.setattr(node_memory, "_map_memory", refused)
    for number in (1, 2):
        sent = machine.publish(number)
        for rank in (1, 2):
            found = machine.arrived(rank)
            assert all(
                torch.equal(found.tensors[name], value) for name, value in sent.tensors.items()
            )
    assert machine.throttle.carried >= 2 * SIZE


def test_small_buckets_and_other_machines_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_memory, "_LEAST_BYTES", 1 << 30)
    small = Machine()
    machines = iter(("a", "b", "c"))
    monkeypatch.setattr("digenrl.transport.lines.machine_identity", lambda: next(machines))
    apart = Machine()
    for each in (small, apart):
        sent = each.publish(1)
        for rank in (1, 2):
            assert torch.equal(each.arrived(rank).tensors["b"], sent.tensors["b"])
        assert each.throttle.carried >= SIZE
        each.close()


def test_memory_is_gone_with_the_link(machine: Machine) -> None:
    machine.publish(1)
    found = [machine.arrived(rank) for rank in (1, 2)]
    machine.links.pop(0).close()
    alike = torch.equal(found[0].tensors["c"], found[1].tensors["c"])
    assert alike, "a mapping outlives its sender"
    found.clear()
    deadline = time.monotonic() + 10.0  # the link's threads end one after another
    while shared_memory():
        assert time.monotonic() < deadline


@pytest.mark.processes
def test_a_run_with_shared_memory_computes_the_same(tmp_path: Path) -> None:
    config = configured(
        *LIGHT, "model.lora=null", "data.prompts_per_batch=2", "schedule.async_steps=1"
    )

    def everything(world: World, session: Session) -> None:
        node_memory._LEAST_BYTES = 1

    def nothing(world: World, session: Session) -> None:
        node_memory._LEAST_BYTES = 1 << 40

    shared, plain = (
        completed(run_cluster(tmp_path / name, 1, 2, config, before=before)).weights
        for name, before in (("shared", everything), ("plain", nothing))
    )
    assert all(torch.equal(shared[name], value) for name, value in plain.items())
