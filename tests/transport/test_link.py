"""The data link: order, back-pressure, strangers, dead peers; and the control store it stands
on."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from digenrl.cluster.control import Aborted, Control
from digenrl.cluster.handshake import AuthenticatedListener, Handshake
from digenrl.cluster.limits import Limits
from digenrl.cluster.network import Network
from digenrl.cluster.store import StoreClient, StoreLost, StoreServer
from digenrl.cluster.world import World
from digenrl.transport.link import PeerLine, SocketLink, _write_buffers, socket_link
from digenrl.transport.wire import Message, MessageKind, WireError, encode

HOST = "127.0.0.1"


OURS = Handshake("secret", seconds=2.0, waiting=8)


@pytest.fixture
def store() -> Iterator[StoreServer]:
    server = StoreServer(socket.create_server((HOST, 0)), OURS)
    yield server
    server.close()


@pytest.fixture
def controls(store: StoreServer) -> list[Control]:
    """Three ranks' views of one store."""
    return [Control(StoreClient(HOST, store.port, OURS), rank, patience=5.0) for rank in range(3)]


@pytest.fixture
def links(controls: list[Control]) -> Iterator[list[SocketLink]]:
    quick = Limits(verdict_s=1.0)
    made = [
        SocketLink(control, rank, HOST, OURS, queue_depth=4, limits=quick)
        for rank, control in enumerate(controls)
    ]
    yield made
    for link in made:
        link.close()


def cells(number: int, size: int = 3) -> Message:
    return Message(MessageKind.CELLS, {"number": number}, {"x": torch.full((size,), float(number))})


def received(link: SocketLink, seconds: float = 10.0) -> Message:
    message = link.receive(seconds)
    assert message is not None, "nothing arrived"
    return message


def test_messages_of_one_sender_keep_their_order_and_bytes(links: list[SocketLink]) -> None:
    for number in range(40):
        links[0].send(2, cells(number))
        links[1].send(2, cells(100 + number))
    found = [received(links[2]) for _ in range(80)]
    numbers = [int(message.meta["number"]) for message in found]
    assert [n for n in numbers if n < 100] == list(range(40))
    assert [n for n in numbers if n >= 100] == list(range(100, 140))
    assert all(
        torch.equal(m.tensors["x"], torch.full((3,), float(m.meta["number"]))) for m in found
    )
    assert links[2].receive(0.0) is None


def test_a_rank_may_send_to_itself_and_two_ranks_to_each_other(links: list[SocketLink]) -> None:
    links[0].send(0, cells(7))
    assert received(links[0]).meta["number"] == 7
    big = 1 << 18
    for number in range(10):  # both directions full at once: no rendezvous, so no deadlock
        links[0].send(1, cells(number, big))
        links[1].send(0, cells(number, big))
    assert [received(links[1]).meta["number"] for _ in range(10)] == list(range(10))
    assert [received(links[0]).meta["number"] for _ in range(10)] == list(range(10))


def test_the_kernel_tunes_the_buffers_of_a_connection(
    links: list[SocketLink], controls: list[Control]
) -> None:
    """A connection begins with the sizes of one on which nobody has set SO_SNDBUF or SO_RCVBUF."""
    links[0].send(1, cells(1))
    received(links[1])
    host, port = _address(controls, 1)
    with OURS.connect(host, port, "link 1", 2) as plain:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            own = links[0]._connected[1].getsockopt(socket.SOL_SOCKET, option)
            assert own >= plain.getsockopt(socket.SOL_SOCKET, option)
            fixed = socket.create_connection((host, port))
            with fixed:
                fixed.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
                assert own != fixed.getsockopt(socket.SOL_SOCKET, option)


@pytest.mark.parametrize("host", [HOST, "::1"])
def test_close_flushes_what_was_sent(controls: list[Control], host: str) -> None:
    sender, receiver = (
        SocketLink(controls[0], 0, host, OURS),
        SocketLink(controls[1], 1, host, OURS),
    )
    for number in range(20):
        sender.send(1, cells(number, 1 << 16))
    sender.close()
    assert [received(receiver).meta["number"] for _ in range(20)] == list(range(20))
    receiver.close()


def test_a_closed_link_lets_nobody_in_and_its_threads_hold_no_process_up(
    controls: list[Control],
) -> None:
    link, other = (SocketLink(control, n, HOST, OURS) for n, control in enumerate(controls[:2]))
    host, port = str(controls[0].get("address/0")).split(":")
    outbox, thread = link.open_outbox(1)
    assert thread.daemon
    given: list[float] = []
    link._outboxes[1] = (_Note(given), thread)  # type: ignore[assignment]
    link.send(1, cells(0))
    assert given == [0.5], "then it is looked whether the run goes on"
    link._outboxes[1] = (outbox, thread)
    link.close()
    other.close()
    with pytest.raises(OSError):  # noqa: PT011  # refused, or reset by the kernel
        OURS.connect(host, int(port), "link 0", 1)


def test_a_link_that_breaks_while_it_sends_is_told_unless_it_is_closing(
    controls: list[Control],
) -> None:
    link = SocketLink(controls[0], 0, HOST, OURS, limits=Limits(verdict_s=0.1))
    controls[0].set("address/1", f"{HOST}:1")  # where nobody listens
    with pytest.raises(ConnectionError, match="rank 0 lost its link to rank 1"):
        link.open_outbox(1) and link.receive(5.0)
    link.close()
    assert link._closing.is_set()
    controls[0].set("address/2", f"{HOST}:1")
    link.open_outbox(2)[1].join(5.0)
    assert link.receive(0.0) is None


class _Note:
    """A queue that notes how long it may be waited for."""

    def __init__(self, given: list[float]) -> None:
        self._given = given

    def put(self, queued: object, timeout: float) -> None:
        self._given.append(timeout)


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("torn", [True, False])
def test_a_dead_peer_is_the_launchers_to_judge_and_ours_where_nobody_watches(
    controls: list[Control], watched: bool, torn: bool
) -> None:
    quick = Limits(verdict_s=0.1)
    link = SocketLink(controls[0], 0, HOST, OURS, watched=watched, limits=quick)
    host, port = str(controls[0].get("address/0")).split(":")
    with OURS.connect(host, int(port), "link 0", 1) as sock:
        sock.sendall(b"".join(encode(cells(3)))[: 9 if torn else None])
    if not torn:
        assert received(link).meta["number"] == 3
    if watched:
        assert link.receive(0.3) is None
    else:
        with pytest.raises(ConnectionError, match="rank 1 ended before the run did"):
            link.receive(5.0)
    link.close()


def _lost(key: str) -> None:
    raise StoreLost("the store is gone")


@pytest.mark.parametrize("end", ["", "done", "store"])
def test_where_nobody_watches_rank_0_sees_each_end_though_nothing_was_sent(
    controls: list[Control], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    quick = Limits(verdict_s=0.1)
    links = [
        SocketLink(control, rank, HOST, OURS, watched=False, limits=quick)
        for rank, control in enumerate(controls)
    ]
    assert [sorted(link._outboxes) for link in links] == [[], [0], [0]]
    links[2].close()
    with pytest.raises(ConnectionError, match="rank 2 ended before the run did"):
        links[0].receive(5.0)
    told = controls[1].get("abort")
    assert told is not None, "a rank in a collective reads no inbox"
    assert told.startswith("rank 2 ended before the run did")
    controls[1].delete("abort")
    if end == "done":
        controls[1].set("done", "1")
    elif end == "store":
        monkeypatch.setattr(controls[0], "get", _lost)
    links[1].close()
    if end == "done":
        assert links[0].receive(0.4) is None
    else:
        with pytest.raises(ConnectionError, match="rank 1 ended before the run did"):
            links[0].receive(5.0)
    monkeypatch.undo()
    links[0].close()


def test_what_a_socket_takes_in_pieces_arrives_whole() -> None:
    """A socket with a time limit takes what its buffer holds, and says how much that was."""
    sizes = (3, 300_000, 0, 1, 500_000)
    buffers = [memoryview(bytes([number + 1]) * size) for number, size in enumerate(sizes)]
    near, far = socket.socketpair()
    near.settimeout(5.0)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    found = bytearray()

    def read() -> None:
        while data := far.recv(1 << 16):
            found.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    _write_buffers(near, buffers)
    near.close()
    reader.join(10.0)
    far.close()
    assert found == b"".join(buffers)


@pytest.mark.processes
def test_a_message_that_waits_for_its_peer_does_not_hold_the_process_up(store: StoreServer) -> None:
    def rank() -> None:
        control = Control(StoreClient(HOST, store.port, OURS), 0, patience=60.0)
        SocketLink(control, 0, HOST, OURS).send(1, cells(0))  # rank 1 never listens

    process = multiprocessing.get_context("fork").Process(target=rank)
    process.start()
    process.join(20.0)
    ended = process.exitcode == 0
    process.kill()
    process.join()
    assert ended


class Slow(PeerLine):
    """Lets nothing pass before it is told to."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.go_on = threading.Event()

    def prepare_outgoing(self, message: Message) -> Message:
        self.seen.append(message.meta["number"])
        self.go_on.wait(5.0)
        return message

    def accept_incoming(self, message: Message, sock: socket.socket) -> Message:
        return self.prepare_outgoing(message)


def test_lines_hold_messages_back_before_they_leave_and_when_they_come(
    controls: list[Control],
) -> None:
    stages: list[str] = []

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        stages.append(name)
        yield

    out, back = Slow(), Slow()
    sender = SocketLink(controls[0], 0, HOST, OURS, stage=stage, lines=lambda peer: out)
    receiver = SocketLink(controls[1], 1, HOST, OURS, lines=lambda peer: back)
    for number in range(3):
        sender.send(1, cells(number))
    assert receiver.receive(0.2) is None
    assert (out.seen, back.seen) == ([0], [])
    out.go_on.set()
    assert receiver.receive(0.2) is None
    assert back.seen == [0]
    back.go_on.set()
    assert [received(receiver).meta["number"] for _ in range(3)] == [0, 1, 2]
    sender.close()
    receiver.close()
    assert (out.seen, back.seen, stages) == ([0, 1, 2], [0, 1, 2], ["send"] * 3)


def test_a_rank_has_the_link_of_its_session(controls: list[Control]) -> None:
    stages: list[str] = []

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        stages.append(name)
        yield

    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    quick, slow = Limits(verdict_s=0.1), Slow()
    slow.go_on.set()
    session: Any = SimpleNamespace(
        host=HOST,
        handshake=OURS,
        network=Network(ports=(port, port)),
        watched=False,
        limits=quick,
        progress=SimpleNamespace(stage=stage),
    )
    world = World(0, 1, 1)
    made = socket_link(controls[0], world, session, torch.device("cpu"), lines=lambda peer: slow)
    other = SocketLink(controls[1], 1, HOST, OURS, watched=False)
    assert controls[1].get("address/0") == f"{HOST}:{port}"
    made.send(1, cells(4))
    assert received(other).meta["number"] == 4
    assert (stages, slow.seen) == (["send"], [4])
    other.close()
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="rank 1 ended before the run did"):
        made.receive(5.0)
    assert time.monotonic() - began < 2.0, "the session's patience"
    made.close()


def test_a_message_goes_on_to_the_ranks_it_names_and_no_further(links: list[SocketLink]) -> None:
    links[0].multicast({1: [2], 0: []}, cells(5))
    passed = received(links[2])
    assert (passed.meta, received(links[0]).meta) == ({"number": 5}, {"number": 5})
    assert received(links[1]).meta == {"number": 5, "relay": [2]}


def _address(controls: list[Control], rank: int) -> tuple[str, int]:
    address = controls[0].get(f"address/{rank}")
    assert address is not None, "what one rank has set, another one finds"
    host, port = address.rsplit(":", 1)
    return host, int(port)


def _bytes(message: Message) -> bytes:
    return b"".join(bytes(buffer) for buffer in encode(message))


HELLO = struct.pack("!4si32s", b"DGR1", 0, b"n" * 32)


@pytest.mark.parametrize(
    "opening",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3,
        os.urandom(512),
        HELLO + b"p" * 32,
        HELLO + _bytes(cells(665)),
    ],
    ids=["http", "noise", "guessed-proof", "message-without-proof"],
)
def test_a_client_without_the_token_is_dropped_and_harms_nobody(
    controls: list[Control], links: list[SocketLink], opening: bytes
) -> None:
    with socket.create_connection(_address(controls, 1), timeout=5.0) as stranger:
        try:
            stranger.sendall(opening + _bytes(cells(666)))
            while stranger.recv(1 << 10):  # the listener's nonce and proof; then it closes
                pass
        except ConnectionError:
            pass  # closed with unread bytes: reset
    links[0].send(1, cells(1))
    assert received(links[1]).meta["number"] == 1
    assert links[1].receive(0.05) is None


def test_a_broken_message_of_a_known_peer_raises_where_it_is_received(
    controls: list[Control], links: list[SocketLink]
) -> None:
    with OURS.connect(*_address(controls, 1), "link 1", 0) as peer:
        peer.sendall(b"garbage garbage garbage")
        with pytest.raises(WireError, match="not a digenrl message"):
            received(links[1])


def test_a_full_queue_blocks_until_the_run_is_aborted(
    controls: list[Control], links: list[SocketLink]
) -> None:
    """Back-pressure: a peer that does not read cannot make this rank's memory grow; an abort ends
    the wait."""
    awake = threading.Event()
    with socket.create_server((HOST, 0)) as deaf:

        def never_read(sock: socket.socket, rank: int) -> None:
            awake.wait(30.0)

        gate = AuthenticatedListener(deaf, OURS, "link 9", never_read)
        controls[0].set("address/9", f"{HOST}:{deaf.getsockname()[1]}")
        threading.Timer(1.0, lambda: controls[1].abort_run("enough")).start()
        sent = [0]

        def flood() -> None:
            for sent[0] in range(200):
                links[0].send(9, cells(sent[0], 1 << 20))

        with pytest.raises(Aborted, match="enough"):
            flood()
        assert sent[0] < 30, "200 messages of 4 MiB went nowhere without anybody waiting"
        began = time.monotonic()
        links[0].close()
        assert time.monotonic() - began < 5.0, "closing waits for a peer that nobody needs any more"
        awake.set()
        gate.close()


@pytest.mark.heavy
def test_a_peer_that_is_gone_is_reported(controls: list[Control], links: list[SocketLink]) -> None:
    with socket.create_server((HOST, 0)) as closed:
        controls[0].set("address/8", f"{HOST}:{closed.getsockname()[1]}")
    links[0].send(8, cells(1))
    with pytest.raises(ConnectionError, match="rank 0 lost its link to rank 8"):
        received(links[0])
    for number in range(3):  # what the queue still holds
        links[0].send(8, cells(number))
    with pytest.raises(ConnectionError, match="can no longer send to rank 8"):
        links[0].send(8, cells(3))


def test_what_is_queued_is_sent_before_a_link_closes_but_not_in_an_aborted_run(
    controls: list[Control], links: list[SocketLink]
) -> None:
    links[0].send(1, cells(1))
    links[0].drain(5.0)
    _, sender = links[0].open_outbox(1)
    assert not sender.is_alive()
    assert received(links[1]).meta["number"] == 1
    _, waiting = links[0].open_outbox(8)  # which never says where it is
    controls[1].abort_run("it is over")
    began = time.monotonic()
    links[0].drain(5.0)
    assert time.monotonic() - began < 2.0
    waiting.join(5.0)


def test_a_link_is_drained_as_long_as_it_may_though_a_full_queue_takes_no_end(
    links: list[SocketLink], controls: list[Control]
) -> None:
    for number in range(4):
        links[0].send(8, cells(number))  # which never says where it is
    outbox, waiting = links[0].open_outbox(8)
    assert outbox.full()
    began = time.monotonic()
    links[0].drain(0.2)
    assert 0.2 <= time.monotonic() - began < 1.0
    assert waiting.is_alive()
    controls[1].abort_run("it is over")


def test_what_is_sent_to_a_lost_rank_is_dropped(
    controls: list[Control], links: list[SocketLink]
) -> None:
    controls[0].mark_lost(8)
    for number in range(5):  # one more than the queue holds
        links[0].send(8, cells(number))
    assert links[0].receive(0.0) is None


@contextmanager
def deaf_peer(controls: list[Control], rank: int) -> Iterator[None]:
    """Listen as `rank`, let each connection prove itself, and never read from it."""
    awake = threading.Event()
    with socket.create_server((HOST, 0)) as listener:

        def never_read(sock: socket.socket, peer: int) -> None:
            awake.wait(30.0)

        gate = AuthenticatedListener(listener, OURS, f"link {rank}", never_read)
        controls[0].set(f"address/{rank}", f"{HOST}:{listener.getsockname()[1]}")
        yield
        awake.set()
        gate.close()


def test_a_rank_that_is_lost_in_the_middle_of_a_message_holds_nobody_up(
    controls: list[Control], links: list[SocketLink]
) -> None:
    """The machine vanished without a word: its end of the connection takes nothing any more."""
    with deaf_peer(controls, 9):
        threading.Timer(1.0, lambda: controls[0].mark_lost(9)).start()
        began = time.monotonic()
        flood = threading.Thread(
            target=lambda: [links[0].send(9, cells(n, 1 << 20)) for n in range(40)], daemon=True
        )
        flood.start()
        flood.join(8.0)
        outbox, sender = links[0].open_outbox(9)
        assert not flood.is_alive(), "it waits for a rank that it could know to be lost"
        assert time.monotonic() - began < 4.0, "each message after the first waits again"
        sender.join(5.0)
        assert not sender.is_alive(), "its connection was not closed"
        assert outbox.qsize() <= 1, "the messages stay in memory"
        assert links[0].receive(0.0) is None


def test_nothing_is_drained_to_a_rank_that_was_lost(
    controls: list[Control], links: list[SocketLink]
) -> None:
    with deaf_peer(controls, 9):
        for number in range(3):
            links[0].send(9, cells(number, 1 << 21))
        threading.Timer(0.5, lambda: controls[0].mark_lost(9)).start()
        began = time.monotonic()
        links[0].drain(8.0)
        assert time.monotonic() - began < 4.0


def test_a_peer_that_the_run_goes_on_without_is_given_up_in_silence(
    controls: list[Control], links: list[SocketLink]
) -> None:
    """The peer's connection breaks before the launcher has said that the peer is lost."""
    with socket.create_server((HOST, 0)) as closed:
        controls[0].set("address/8", f"{HOST}:{closed.getsockname()[1]}")
    _, sender = links[0].open_outbox(8)
    time.sleep(0.1)
    assert sender.is_alive(), "it waits for the verdict"
    controls[0].mark_lost(8)
    sender.join(5.0)
    assert not sender.is_alive()
    assert links[0].receive(0.0) is None


@pytest.mark.heavy
def test_after_the_end_of_the_run_a_peer_that_is_gone_is_nobodys_problem(
    controls: list[Control], links: list[SocketLink]
) -> None:
    """Trainers leave first; what a rollout was still sending for the next step is not missed."""
    with socket.create_server((HOST, 0)) as closed:
        controls[0].set("address/8", f"{HOST}:{closed.getsockname()[1]}")
    controls[0].set("done", "1")
    for number in range(5):  # one more than the queue holds
        links[0].send(8, cells(number))
    assert links[0].receive(0.5) is None


def test_claims_are_unique_and_dense(controls: list[Control]) -> None:
    taken: list[int] = []

    def take(control: Control) -> None:
        taken.extend(control.add("claim", 1) - 1 for _ in range(50))

    threads = [threading.Thread(target=take, args=(control,)) for control in controls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(150))
    assert controls[0].add("claim", 0) == 150
    assert controls[0].add("claim", 0) == 150
    assert controls[0].add("other", 0) == 0


def test_the_first_abort_counts_and_ends_every_wait(controls: list[Control]) -> None:
    controls[0].check_abort()
    threading.Timer(0.2, lambda: controls[1].abort_run("rank 1 failed")).start()
    with pytest.raises(Aborted, match="rank 1 failed"):
        controls[0].wait_for("never", "something")
    controls[2].abort_run("a later cause")
    with pytest.raises(Aborted, match="rank 1 failed"):
        controls[2].check_abort()


def test_a_wait_ends_with_its_patience(store: StoreServer) -> None:
    impatient = Control(StoreClient(HOST, store.port, OURS), 5, patience=0.2)
    with pytest.raises(Aborted, match=r"rank 5 waited 0 s \(limits\.start_s\) for a miracle"):
        impatient.wait_for("never", "a miracle")


def test_meta_is_plain_json(links: list[SocketLink]) -> None:
    meta = {"list": [1, 2.5, None, True], "nested": {"text": "größer"}}
    links[0].send(1, Message(MessageKind.STATE, meta))
    assert json.loads(json.dumps(received(links[1]).meta)) == meta
