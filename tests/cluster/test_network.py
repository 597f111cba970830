"""Where ranks listen: IPv6, a range of ports, an interface that is not there."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from digenrl.cluster.control import Control
from digenrl.cluster.handshake import Handshake
from digenrl.cluster.network import Network
from digenrl.cluster.store import StoreClient, StoreServer
from digenrl.transport.link import SocketLink
from digenrl.transport.wire import Message, MessageKind
from tests.strategy.processes import TINY

IPV6 = "::1"
LOOPBACK = next(
    name
    for name, found in psutil.net_if_addrs().items()
    if any(a.address == "127.0.0.1" for a in found)
)


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    """Three neighbouring ports that are free on both loopback addresses."""
    for first in range(20_000, 30_000, 3):
        try:
            for port in range(first, first + 3):
                socket.create_server((IPV6, port), family=socket.AF_INET6).close()
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        yield first, first + 2
        return


@pytest.mark.processes
def test_a_store_and_two_links_over_ipv6_in_a_range_of_three_ports(ports: tuple[int, int]) -> None:
    network, ours = Network(ports=ports), Handshake()
    store = StoreServer(network.open_listener(IPV6), ours)
    controls = [
        Control(StoreClient(store.host, store.port, ours), rank, patience=5.0) for rank in range(3)
    ]
    links = [SocketLink(controls[rank], rank, IPV6, ours, network=network) for rank in range(2)]
    try:
        sent = torch.arange(5.0)
        links[0].send(1, Message(MessageKind.CELLS, {}, {"x": sent}))
        message = links[1].receive(10.0)
        assert message is not None
        assert torch.equal(message.tensors["x"], sent)
        taken = [
            store.port,
            *(int(str(controls[0].get(f"address/{rank}")).rpartition(":")[2]) for rank in range(2)),
        ]
        assert sorted(taken) == list(range(ports[0], ports[1] + 1))
        with pytest.raises(
            OSError,
            match=rf"network\.ports = \[{ports[0]}, {ports[1]}\]: every port is taken on ::1",
        ):
            SocketLink(controls[2], 2, IPV6, ours, network=network)
    finally:
        for link in links:
            link.close()
        store.close()


def test_the_interface_decides_the_address_and_what_gloo_and_nccl_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "other0")
    assert Network().interface_address(lambda: "10.0.0.9") == "10.0.0.9"
    Network().announce_interface("127.0.0.1")
    named = Network(interface=LOOPBACK)
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "other0"
    assert named.interface_address(lambda: "10.0.0.9") == "127.0.0.1"
    named.announce_interface("127.0.0.1")
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == (
        LOOPBACK,
        f"={LOOPBACK}",
    )


def test_too_few_ports_are_counted_and_the_remedy_named() -> None:
    Network(ports=(29600, 29602)).check_listeners(3)
    with pytest.raises(
        ValueError, match=r"3 ports, but 5 are needed .* network\.ports=\[29600,29604\]"
    ):
        Network(ports=(29600, 29602)).check_listeners(5)


def test_an_interface_that_does_not_exist_is_answered_with_those_that_do() -> None:
    with pytest.raises(
        ValueError, match=rf"interface = ib7: does not exist .*{LOOPBACK} \(127\.0\.0\.1.*=null"
    ):
        Network(interface="ib7").check_listeners(2)


def test_others_can_use_an_address_that_is_not_of_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPv4 first; without a configured interface gloo is told who has the address."""
    entry = namedtuple("entry", "family address")
    four, six = socket.AF_INET, socket.AF_INET6
    there = {
        "lo": [entry(four, "127.0.0.1")],
        "ib0": [entry(six, "fe80::1"), entry(six, "fd00::1"), entry(four, "10.0.0.9"), entry(99, "aa:bb")],
        "ib1": [entry(six, "fd00::2"), entry(six, "fe80::2")],
        "down": [entry(six, "fe80::3")],
    }  # fmt: skip
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: there)
    assert [Network(interface=name).interface_address("") for name in ("ib0", "ib1")] == [
        "10.0.0.9",
        "fd00::2",
    ]
    known = r"there are lo \(127\.0\.0\.1\), ib0 \(10\.0\.0\.9, fd00::1\), ib1 \(fd00::2\)\. Name"
    with pytest.raises(ValueError, match=rf"interface = down: has no address on .*; {known}"):
        Network(interface="down").interface_address("")
    with pytest.raises(ValueError, match=rf"interface = ib2: does not exist on .*; {known}"):
        Network(interface="ib2").interface_address("")
    for host, told in (("10.0.0.9", "ib0"), ("fd00::2", "ib1"), ("10.0.0.8", None)):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            monkeypatch.setenv(name, "")  # so that it is put back as it was
            monkeypatch.delenv(name)
        Network().announce_interface(host)
        assert os.environ.get("GLOO_SOCKET_IFNAME") == told
        assert "NCCL_SOCKET_IFNAME" not in os.environ


def test_a_listener_takes_the_first_free_port_of_a_range(ports: tuple[int, int]) -> None:
    network = Network(ports=ports)
    listeners = [network.open_listener("127.0.0.1") for _ in range(3)]
    taken = [listener.getsockname()[1] for listener in listeners]
    assert taken == [*range(ports[0], ports[1] + 1)]
    with pytest.raises(OSError, match=r"every port is taken on 127\.0\.0\.1; widen") as refused:
        network.open_listener("127.0.0.1")
    assert refused.value.errno == errno.EADDRINUSE
    for listener in listeners:
        listener.close()
    with pytest.raises(OSError, match="assign requested") as refused:
        Network(ports=ports).open_listener("192.0.2.1")
    assert refused.value.errno == errno.EADDRNOTAVAIL


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_that_this_machine_cannot_host_starts_no_rank(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "digenrl.cli.train",
        *TINY,
        "network.interface=ib7",
        f"output_root={tmp_path / 'outputs'}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr
    assert "network.interface = ib7: does not exist" in done.stderr, done.stderr
    assert LOOPBACK in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "outputs").exists()
