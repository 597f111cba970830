"""Who may speak: what a stranger can do with a connection, a recording, a reflection, or an address
of its own."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from digenrl.cluster.handshake import AuthenticatedListener, Handshake, NotOfThisRun
from digenrl.cluster.store import StoreClient, StoreLost, StoreServer

pytestmark = pytest.mark.processes
HOST = "127.0.0.1"
OURS = Handshake("secret", seconds=1.0, waiting=8)
HELLO = struct.pack("!4si32s", b"DGR1", 0, b"n" * 32)
PROOF = 32


class Door:
    """A gate that keeps who came in, and what they said."""

    def __init__(self, purpose: str = "test") -> None:
        self.ranks: list[int] = []
        self.heard = b""
        listener = socket.create_server((HOST, 0))
        self.port = int(listener.getsockname()[1])
        self.gate = AuthenticatedListener(listener, OURS, purpose, self._welcome)

    def _welcome(self, sock: socket.socket, rank: int) -> None:
        self.ranks.append(rank)
        while data := sock.recv(1 << 10):
            self.heard += data
            sock.sendall(b"heard")

    def stranger(self) -> socket.socket:
        return socket.create_connection((HOST, self.port), timeout=5.0)


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door()
    yield door
    door.gate.close()


def ended(sock: socket.socket) -> bool:
    """Whether the other end closes the connection."""
    try:
        while sock.recv(1 << 10):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def exactly(sock: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        piece = sock.recv(size - len(found))
        assert piece, "closed too early"
        found += piece
    return found


def test_who_holds_the_token_comes_in_under_its_rank(door: Door) -> None:
    with OURS.connect(HOST, door.port, "test", 3) as sock:
        sock.sendall(b"hello")
        assert exactly(sock, 5) == b"heard"
    assert (door.ranks, door.heard) == ([3], b"hello")
    assert "secret" not in repr(OURS)


@pytest.mark.parametrize("other", [Handshake("another"), Handshake("")])
def test_another_token_or_another_door_is_noticed_by_who_connects(
    door: Door, other: Handshake
) -> None:
    with pytest.raises(NotOfThisRun, match="does not hold this run's token"):
        other.connect(HOST, door.port, "test")
    with pytest.raises(NotOfThisRun):
        OURS.connect(HOST, door.port, "link 1")
    assert door.ranks == []


@contextmanager
def recording(port: int) -> Iterator[tuple[int, list[bytes]]]:
    """(port of a proxy to `port`, what the connecting end said through it)."""
    said: list[bytes] = []
    with socket.create_server((HOST, 0)) as server:

        def carry() -> None:
            inbound, _ = server.accept()
            with inbound, socket.create_connection((HOST, port)) as outbound:
                there, back = (inbound, outbound), (outbound, inbound)
                for (source, target), size in ((there, 40), (back, 64), (there, 32), (back, 1)):
                    data = exactly(source, size)
                    target.sendall(data)
                    if source is inbound:
                        said.append(data)

        thread = threading.Thread(target=carry)
        thread.start()
        yield int(server.getsockname()[1]), said
        thread.join(5.0)


def test_a_recorded_handshake_is_worth_nothing(door: Door) -> None:
    with recording(door.port) as (port, said):
        OURS.connect(HOST, port, "test", 7).close()
    assert len(said) == 2
    while not door.ranks:
        time.sleep(0.01)
    with door.stranger() as sock:
        sock.sendall(said[0])
        exactly(sock, 32 + PROOF)
        sock.sendall(said[1] + b"abort")
        assert ended(sock)
    assert (door.ranks, door.heard) == ([7], b"")


def test_the_listening_ends_own_proof_opens_no_door(door: Door) -> None:
    """The attacker sends the listener's own proof back, on this connection and on another with the
    same nonces."""
    with door.stranger() as first, door.stranger() as second:
        first.sendall(HELLO)
        answer = exactly(first, 32 + PROOF)
        second.sendall(HELLO[:8] + answer[:32])
        other = exactly(second, 32 + PROOF)
        first.sendall(answer[32:] + b"abort")
        second.sendall(other[32:] + b"abort")
        assert ended(first)
        assert ended(second)
    assert (door.ranks, door.heard) == ([], b"")


def test_who_waits_at_an_address_learns_nothing_and_is_told_nothing() -> None:
    heard = [b""]
    with socket.create_server((HOST, 0)) as trap:

        def listen() -> None:
            sock, _ = trap.accept()
            with sock:
                heard[0] += exactly(sock, 40)
                sock.sendall(bytes(64))
                heard[0] += sock.recv(1 << 10)

        thread = threading.Thread(target=listen)
        thread.start()
        with pytest.raises(NotOfThisRun):
            OURS.connect(HOST, int(trap.getsockname()[1]), "link 0", 2)
        thread.join(5.0)
    assert len(heard[0]) == 40, "the proof was shown to somebody who had shown none"
    assert b"secret" not in heard[0]


def test_strangers_are_few_and_stay_short_and_keep_nobody_out(door: Door) -> None:
    flood = [door.stranger() for _ in range(100)]
    for sock in flood[::2]:
        sock.sendall(HELLO)
    OURS.connect(HOST, door.port, "test", 1).close()
    began = time.monotonic()
    while sum(thread.name == "test" for thread in threading.enumerate()) > OURS.waiting:
        assert time.monotonic() - began < 0.8, "more strangers stay than may"
        time.sleep(0.01)
    assert all(ended(sock) for sock in flood)
    assert time.monotonic() - began < 3.0
    with door.stranger() as slow:  # a byte now and then gains no time
        began = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() - began < 5.0:
                slow.sendall(b"D")
                time.sleep(0.2)
        assert time.monotonic() - began < 3.0
    assert door.ranks == [1]


def test_a_store_answers_its_run_alone_and_says_when_it_is_gone() -> None:
    server = StoreServer(socket.create_server((HOST, 0)), OURS)
    store = StoreClient(server.host, server.port, OURS)
    store.set("a", "1")
    assert store.read_values(["a", "b"]) == [b"1", None]
    assert (store.add("n", 2), store.add("n", 3)) == (2, 5)
    assert store.compare_and_swap("a", "1", "2")
    assert not store.compare_and_swap("a", "1", "3")
    assert not store.compare_and_swap("a", "", "3")
    assert store.compare_and_swap("new", "", "x")
    assert store.delete_key("a")
    assert not store.delete_key("a")
    with pytest.raises(NotOfThisRun):
        StoreClient(server.host, server.port, Handshake("another"))
    server.close()
    with pytest.raises(StoreLost, match="no store answers"):
        StoreClient(server.host, server.port, OURS)


def test_a_store_that_stays_silent_is_lost_after_the_limit_of_a_request() -> None:
    """The store's machine answers, its process does not. Nobody takes the late answer."""
    handshake, silent = Handshake(answer_s=2.0), threading.Event()

    def welcome(sock: socket.socket, rank: int) -> None:
        silent.wait(20.0)
        with suppress(OSError):
            sock.sendall((0).to_bytes(4))

    listener = socket.create_server(("127.0.0.1", 0))
    acceptor = AuthenticatedListener(listener, handshake, "store", welcome)
    client = StoreClient("127.0.0.1", listener.getsockname()[1], handshake)
    began = time.monotonic()
    with pytest.raises(StoreLost, match="no answer within 2 s"):
        client.read_values(["key"])
    assert 1.0 < time.monotonic() - began < 10.0
    silent.set()
    with pytest.raises(StoreLost):
        client.read_values(["key"])
    acceptor.close()


def test_every_socket_of_a_run_ends_when_its_peer_cannot_be_reached() -> None:
    """TCP_USER_TIMEOUT bounds writes, keepalive bounds reads, at both ends."""
    handshake, met, over = Handshake(), list[socket.socket](), threading.Event()

    def welcome(sock: socket.socket, rank: int) -> None:
        met.append(sock)
        over.wait(20.0)

    listener = socket.create_server(("127.0.0.1", 0))
    acceptor = AuthenticatedListener(listener, handshake, "any", welcome)
    with handshake.connect("127.0.0.1", listener.getsockname()[1], "any") as sock:
        deadline = time.monotonic() + 10.0
        while not met and time.monotonic() < deadline:
            time.sleep(0.01)
        for end in (sock, *met):
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
        over.set()
    acceptor.close()
