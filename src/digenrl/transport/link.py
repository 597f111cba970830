"""The data plane: one TCP connection per (sender, receiver), opened on first use; a dead peer
affects no other one.

    caller's thread             thread link-to-PEER          thread "link RANK"          caller's thread
    send -> encode -> outbox -> (waits for the address,  ->  decode -> inbox         ->  receive
                    (bounded)   connects, writes)

`send` waits while the outbox is full: until the peer reads, is lost, or the run is aborted. What is
queued for a lost peer is dropped, and the connection to it is closed.
`receive` waits at most its timeout. A reader waits for bytes, and ends when the peer closes the
connection. What travels between two ranks can be delayed or compressed: each end of a connection
shows its messages to a `PeerLine`.

Why sockets and not gloo: with gloo an expired wait closes the pair, and a posted receive cannot be
polled. Building a pair can deadlock two ranks that send to each other. A socket reports a dead peer
at once. Collectives stay with torch.distributed.

Every rank listens, and publishes its address on the control store. A connection begins with a
handshake in which both ends prove that they hold the run's token (`digenrl.cluster.handshake`).
"""  # noqa: E501

from __future__ import annotations

import math
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol

import torch

from digenrl.cluster.control import Aborted, Control, PeerLost
from digenrl.cluster.handshake import AuthenticatedListener, Handshake
from digenrl.cluster.limits import Limits
from digenrl.cluster.network import ANY_NETWORK, Network
from digenrl.cluster.sockets import UNREAD_S, end_when_unreachable
from digenrl.cluster.store import StoreLost
from digenrl.cluster.world import Session, World
from digenrl.transport.wire import Buffers, Message, WireError, decode, encode, on_host

RELAY = "relay"
"""Key in a message's meta: ranks to which the receiver's link passes the message on, whatever the
receiver is doing."""
_VECTOR = 1024
"""Most buffers that one system call takes (IOV_MAX of Linux)."""
MAX_MESSAGE_BYTES = 64 << 30
_DEFAULT = Limits()
_Queued = tuple[Message, Buffers]
"""A message and its buffers."""
Routes = Mapping[int, Sequence[int]]
"""Receiver of a message -> ranks to which the receiver passes the message on."""


class Link(Protocol):
    """Messages between ranks, as the strategy needs them. RDMA or NCCL transports fit behind these
    five calls."""

    def send(self, peer: int, message: Message) -> None:
        """Queue `message` for `peer`. Blocks only while the peer's bounded queue is full.

        The tensors belong to the link from now on: do not write to them.
        """

    def multicast(self, routes: Routes, message: Message) -> None:
        """Queue `message` for every rank of `routes`, as `send` does."""

    def receive(self, timeout: float) -> Message | None:
        """Return the next message from any rank, or None after `timeout` seconds.

        Raises whatever broke a connection, except after the end of the run.
        """

    def drain(self) -> None:
        """Wait until every queued message has been written to each peer that is alive. Nothing can
        be sent afterwards."""

    def close(self) -> None:
        """Flush queued messages (for a limited time; not at all in an aborted run), then close."""


class PeerLine:
    """Filter of a connection's messages, at either end. A subclass can delay, compress
    or replace messages. Called in the link's threads."""

    def prepare_outgoing(self, message: Message) -> Message:
        """Return what is written in place of `message`, perhaps later."""
        return message

    def note_written(self, message: Message, sock: socket.socket) -> None:
        """Take note that `message`, as returned by `prepare_outgoing`, was written to `sock`. May
        read there what the peer's `accept_incoming` answers."""

    def accept_incoming(self, message: Message, sock: socket.socket) -> Message | None:
        """Return the message to deliver in place of `message`, or None to deliver nothing. May wait
        first, and may answer on `sock`."""
        return message


Lines = Callable[[int], PeerLine]
"""Makes the line of one direction of a connection, given the peer."""


class LinkMaker(Protocol):
    """Makes the link of a rank: `socket_link`, or `transport.broadcast.broadcast_link`."""

    def __call__(
        self, control: Control, world: World, session: Session, device: torch.device
    ) -> Link: ...


class SocketLink:
    """`Link` over TCP with one sender thread per peer and one reader thread per inbound connection.

    Args:
        network: the range of ports in which the link listens, on `host`.
        watched: whether a launcher decides if the run survives a death. Otherwise a connection that
            ends before the
            run does is an error.
        limits: how long `close` waits for what is still queued, and how long the launcher may take
            to judge a death.
        stage: returns the context that marks this thread's stage, "send" while it writes a message.
        lines: peer -> the line that may delay or compress messages with this peer.
    """

    def __init__(
        self,
        control: Control,
        rank: int,
        host: str,
        handshake: Handshake,
        queue_depth: int = 256,
        network: Network = ANY_NETWORK,
        watched: bool = True,
        limits: Limits = _DEFAULT,
        stage: Callable[[str], AbstractContextManager[object]] = nullcontext,
        lines: Lines = lambda peer: PeerLine(),
    ) -> None:
        self._control, self._rank, self._handshake, self._depth = (
            control,
            rank,
            handshake,
            queue_depth,
        )
        self._watched, self._limits, self._stage = watched, limits, stage
        self._inbox: queue.Queue[Message | BaseException] = queue.Queue()
        self._outboxes: dict[int, tuple[queue.Queue[_Queued | None], threading.Thread]] = {}
        self._connected: dict[int, socket.socket] = {}
        """peer -> the socket to which this rank writes."""
        self._dropped: set[int] = set()
        """Lost peers, to which nothing is written any more."""
        self._lines = lines
        self._opening, self._closing = threading.Lock(), threading.Event()
        listener = network.open_listener(host)
        self._acceptor = AuthenticatedListener(
            listener, handshake, _link_purpose(rank), self._read_messages
        )
        # Only now can other ranks find the listener.
        control.set(f"address/{rank}", f"{host}:{listener.getsockname()[1]}")
        if not watched and rank > 0:
            self.open_outbox(0)  # which then sees this rank's death, also while nothing is sent

    def send(self, peer: int, message: Message) -> None:
        if peer == self._rank:
            self._inbox.put(message)
            return
        message = on_host(message)
        queued = message, encode(message)  # here: a bad one fails in its author's stack
        outbox, thread = self.open_outbox(peer)
        while peer not in self._dropped:
            try:
                # A bounded wait, so that an aborted run, a lost peer or a dead sender thread is
                # noticed.
                return outbox.put(queued, timeout=0.5)
            except queue.Full:
                self._control.check_abort()
                # Also while the thread lives: a write to a machine that is gone can block for
                # UNREAD_S.
                if self._drop_lost_peer(peer):
                    return None
                if not thread.is_alive():
                    if self._run_finished():
                        return None
                    raise ConnectionError(
                        f"rank {self._rank} can no longer send to rank {peer}."
                    ) from None

    def multicast(self, routes: Routes, message: Message) -> None:
        for rank, further in routes.items():
            relay = {RELAY: list(further)} if further else {}
            self.send(rank, replace(message, meta={**message.meta, **relay}))

    def open_outbox(self, peer: int) -> tuple[queue.Queue[_Queued | None], threading.Thread]:
        """Connect to `peer`, which can then see this rank's end. Return the peer's queue and the
        thread that empties it."""
        with self._opening:  # the scorer's thread sends too
            if peer not in self._outboxes:
                box: queue.Queue[_Queued | None] = queue.Queue(self._depth)
                thread = threading.Thread(
                    target=self._write_messages,
                    args=(peer, box),
                    name=f"link-to-{peer}",
                    daemon=True,
                )
                thread.start()
                self._outboxes[peer] = (box, thread)
            return self._outboxes[peer]

    def receive(self, timeout: float) -> Message | None:
        try:
            # A negative timeout would be an error.
            item = self._inbox.get(timeout=timeout) if timeout > 0 else self._inbox.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise item
        return item

    def drain(self, seconds: float = math.inf) -> None:
        deadline = time.monotonic() + seconds
        for peer, (outbox, thread) in self._outboxes.items():
            ended = False
            while thread.is_alive() and time.monotonic() < deadline and not self._run_aborted():
                if self._drop_lost_peer(peer):
                    break
                # None ends the sender. A blocking put could wait for ever on a peer that has
                # stopped reading.
                if not ended and not outbox.full():
                    outbox.put(None)
                    ended = True
                thread.join(timeout=0.05)

    def close(self) -> None:
        self.drain(self._limits.leave_s)
        # From now on a connection that ends is no news.
        self._closing.set()
        self._acceptor.close()

    def _drop_lost_peer(self, peer: int) -> bool:
        """Return whether `peer` is lost. Then forget what is queued for it, and wake the thread
        that writes to it."""
        try:
            if peer not in self._control.lost_ranks():
                return False
        except StoreLost:
            return False
        self._dropped.add(peer)
        outbox, _ = self._outboxes[peer]
        with suppress(queue.Empty):
            while True:
                outbox.get_nowait()
        with suppress(queue.Full):
            outbox.put_nowait(None)
        # Not the connection from the peer: what a rank sent before it left is still to be read.
        if (sock := self._connected.get(peer)) is not None:
            with suppress(OSError):  # it is closed already
                sock.shutdown(socket.SHUT_RDWR)
        return True

    def _run_finished(self) -> bool:
        """Return whether the trainers have ended the run and need nothing more."""
        try:
            return self._control.get("done") is not None
        except StoreLost:  # the store is gone too
            return False

    def _run_aborted(self) -> bool:
        """Return whether the run was aborted. Then no rank waits for what is still queued."""
        try:
            self._control.check_abort()
        except Aborted:
            return True
        return False

    def _write_messages(self, peer: int, outbox: queue.Queue[_Queued | None]) -> None:
        try:
            address = self._control.wait_for(f"address/{peer}", f"address of rank {peer}", peer)
            host, port = address.rsplit(":", 1)
            with self._handshake.connect(host, int(port), _link_purpose(peer), self._rank) as sock:
                end_when_unreachable(sock, UNREAD_S)
                # No SO_SNDBUF or SO_RCVBUF at either end: a fixed size switches the kernel's tuning
                # off, and net.core.wmem_max cuts it to 208 KiB on most machines (socket(7)).
                line = self._lines(peer)
                self._connected[peer] = sock
                # In this order: a peer that is dropped meanwhile is seen here or shut down there.
                while peer not in self._dropped and (queued := outbox.get()) is not None:
                    with self._stage("send"):
                        message, buffers = queued
                        shown = line.prepare_outgoing(message)
                        _write_buffers(sock, buffers if shown is message else encode(shown))
                        line.note_written(shown, sock)
        # The run goes on without this peer, and what is queued for it is dropped.
        except PeerLost:
            return
        except (OSError, Aborted) as error:
            if (
                not self._closing.is_set()
                and not self._run_finished()
                and not self._goes_on_without(peer)
            ):
                self._inbox.put(
                    ConnectionError(f"rank {self._rank} lost its link to rank {peer}: {error}")
                )

    def _goes_on_without(self, peer: int) -> bool:
        """Return whether the run goes on without `peer`, to which the connection broke."""
        try:
            return self._control.goes_on_without(peer, self._limits.verdict_s)
        except (Aborted, StoreLost):
            return False

    def _read_messages(self, sock: socket.socket, peer: int) -> None:
        line = self._lines(peer)

        def fill_buffer(buffer: memoryview) -> None:
            while buffer:
                # MSG_WAITALL may still return less, for example after a signal.
                received = sock.recv_into(buffer, 0, socket.MSG_WAITALL)
                if received == 0:
                    raise EOFError("the peer closed the connection in the middle of a message")
                buffer = buffer[received:]

        try:
            while sock.recv(
                1, socket.MSG_PEEK
            ):  # an empty peek is an orderly end between two messages
                message = line.accept_incoming(decode(fill_buffer, MAX_MESSAGE_BYTES), sock)
                if message is not None:
                    self._deliver_message(message)
        except (OSError, EOFError, WireError, Aborted) as error:
            # Report a message that cannot be read. A lost peer is handled below.
            if isinstance(error, WireError) and not self._closing.is_set():
                self._inbox.put(error)
        finally:
            sock.close()
        # Without a launcher, this rank ends the run when a peer is lost.
        if not (
            self._watched
            or self._closing.is_set()
            or self._run_finished()
            or self._goes_on_without(peer)
        ):
            cause = (
                f"rank {peer} ended before the run did: its connection to rank {self._rank} closed."
            )
            # On the store too: the main thread may be in a collective, and read no inbox for long.
            with suppress(StoreLost):
                if not self._run_finished():
                    self._control.abort_run(cause)
            self._inbox.put(ConnectionError(cause))

    def _deliver_message(self, message: Message) -> None:
        # Before the inbox: the other ranks of the node must not wait until this rank reads its
        # inbox.
        self._pass_on(message)
        self._inbox.put(message)

    def _pass_on(self, message: Message) -> None:
        """Send a message on to the other ranks of this node, so that it crosses the network
        once."""
        meta = {key: it for key, it in message.meta.items() if key != RELAY}
        for peer in message.meta.get(RELAY, ()):
            self.send(int(peer), replace(message, meta=meta))


def socket_link(
    control: Control,
    world: World,
    session: Session,
    device: torch.device,
    kind: Callable[..., SocketLink] = SocketLink,
    **changes: Any,
) -> SocketLink:
    """Return this rank's link, of class `kind`, with `changes` to its arguments."""
    return kind(
        control,
        world.rank,
        session.host,
        session.handshake,
        network=session.network,
        watched=session.watched,
        limits=session.limits,
        stage=session.progress.stage,
        **changes,
    )


def _link_purpose(rank: int) -> str:
    """Return the purpose of a connection to `rank`, for the handshake."""
    return f"link {rank}"


def write_message(sock: socket.socket, message: Message) -> None:
    """Write a message whose tensors are contiguous and in CPU memory."""
    _write_buffers(sock, encode(message))


def _write_buffers(sock: socket.socket, buffers: Buffers) -> None:
    """Send all of `buffers`, many in one system call."""
    pending = deque(buffer for buffer in buffers if buffer)
    while pending:
        sent = sock.sendmsg(tuple(islice(pending, _VECTOR)))
        while pending and sent >= len(pending[0]):
            sent -= len(pending.popleft())
        if sent:
            pending[0] = pending[0][sent:]
