"""Publish weights by broadcasts of torch.distributed, from trainer 0 to the rollouts that a run
began with.

    trainer 0, thread `broadcast`                          rollout, thread `broadcast`
    announce (socket), broadcast the bytes  ------------>  take part, digest, inbox
    after a version's last message: reduce  <----------->  proof that every member has all of it

The group (NCCL, or gloo on processors) is formed before the first bytes, when all members are
there. The group ends with the first member that is lost, or with a piece that makes no progress for
`limits.silent_s`. The rank that notices this writes the cause on the control store, and all ranks
leave the group. The version in progress travels again from its first message, as a stream, and
later versions do likewise. A rollout skips the messages that it has already. A rank that joins the
run is no member, and gets streams.

On the control store:
    broadcast/group    the prefix of torch's own keys
    broadcast/ended    why there is no group any more
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from digenrl import accelerator
from digenrl.cluster.control import Aborted, Control
from digenrl.cluster.store import StoreLost
from digenrl.cluster.world import Session, World
from digenrl.record.run_dir import append_event
from digenrl.transport.link import RELAY, Routes, SocketLink, socket_link
from digenrl.transport.weights import is_bucket
from digenrl.transport.wire import Message, MessageKind, empty_bytes, tensor_bytes

_SHARED = "broadcast"
"""Key of a message's meta: number of bytes that follow by broadcast; null = the message itself
carries them."""
_FORM = "form"
"""Value of `_SHARED` in the message that tells members to form the group."""
_ENDED = "broadcast/ended"
_PIECE_BYTES = 64 << 20
"""Bytes of a message that a GPU holds at once."""
_ON_ERROR = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_LOOK_S = 0.1
"""Seconds between two looks at the control store."""


class _Over(RuntimeError):
    """The group has lost a member, has timed out, or is being closed."""


class Collectives(Protocol):
    """Group of a backend (gloo, NCCL) outside of torch's default group."""

    def broadcast(self, tensor: Tensor, root: int) -> dist.Work: ...
    def allreduce(self, tensor: Tensor) -> dist.Work: ...
    def abort(self) -> None: ...


@dataclass(frozen=True)
class Audience:
    """Members of a broadcast: trainer 0 and the rollouts that a run began with."""

    ranks: Sequence[int]
    """Launch ranks. The first one sends."""
    store: dist.Store
    """Store over which the group is formed."""
    device: torch.device
    """Device of this rank, whose kind decides the backend."""
    tell: Callable[[str, Mapping[str, Any]], object]
    """Function that writes an event (kind, facts) into the run's events."""


class BroadcastLink(SocketLink):
    """Link of a member of `audience`; other arguments are those of `SocketLink`.

    Messages that trainer 0 multicasts arrive in order, whether by broadcast or as streams.
    """

    def __init__(self, audience: Audience, *args: Any, **kwargs: Any) -> None:
        self._audience = audience
        self._turns: queue.Queue[tuple[Routes, Message] | None] = queue.Queue()
        """Messages for the broadcast thread, with their routes; routes are empty on a rollout."""
        # No group -> formed -> ended. A group that has ended is never formed again.
        self._group: Collectives | None = None
        self._ended = False
        self._kept: list[tuple[Routes, Message]] = []
        """Trainer 0: messages of the version in progress, with the routes to ranks that may lack
        them."""
        self._passed: tuple[int, float] = (0, -1.0)
        """Rollout: version and bucket of the last message that it has received."""
        self._stream: torch.Stream | None = None
        # After the fields above, because the listener's threads may deliver a message at once.
        super().__init__(*args, **kwargs)
        self._sends = self._rank == audience.ranks[0]
        if self._sends:
            # Trainer 0 alone has a bound. A rollout's reader must never wait here.
            self._turns.maxsize = self._depth
        self._thread = threading.Thread(target=self._process_turns, name="broadcast", daemon=True)
        self._thread.start()

    def multicast(self, routes: Routes, message: Message) -> None:
        if not self._sends:
            return super().multicast(routes, message)
        while True:
            try:
                return self._turns.put((routes, message), timeout=0.5)
            except queue.Full:
                self._control.check_abort()

    def drain(self, seconds: float = math.inf) -> None:
        deadline = time.monotonic() + seconds
        if self._sends:
            with suppress(queue.Full):
                self._turns.put(None, timeout=0.5)
            while (
                self._thread.is_alive() and time.monotonic() < deadline and not self._run_aborted()
            ):
                self._thread.join(timeout=0.05)
        super().drain(deadline - time.monotonic())

    def close(self) -> None:
        super().close()
        with suppress(queue.Full):
            self._turns.put_nowait(None)
        self._leave_group()

    def _deliver_message(self, message: Message) -> None:
        if _SHARED not in message.meta:
            return super()._deliver_message(message)
        self._pass_on(message)
        # The broadcast thread delivers it, so that streams and broadcasts keep one order.
        return self._turns.put(({}, message))

    def _process_turns(self) -> None:
        try:
            if accelerator.is_own(self._audience.device):
                # A stream of its own, so that a broadcast does not queue up behind the computation.
                torch.accelerator.set_device_index(self._audience.device)
                self._stream = torch.Stream(self._audience.device)
            with self._own_stream():
                while (turn := self._turns.get()) is not None:
                    if self._sends:
                        self._send_message(*turn)
                    else:
                        self._receive_message(turn[1])
        except (Aborted, StoreLost):  # every rank sees this by itself
            return
        except (
            BaseException
        ) as error:  # raised again by `receive`, in the thread that can act on it
            self._inbox.put(error)

    def _own_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else self._stream

    # ---- trainer 0

    def _send_message(self, routes: Routes, message: Message) -> None:
        peers = _reached_ranks(routes)
        members = peers.intersection(self._audience.ranks)
        self._kept.append((routes, message))
        # If the group ends below, the whole version so far is sent again.
        again = self._kept
        try:
            if members and self._ensure_group(message) and self._broadcast_message(message):
                # The others get it by socket now. Members may need it again until the digest is
                # agreed on.
                self._kept[-1] = dict.fromkeys(members, ()), message
                super().multicast(dict.fromkeys(peers - members, ()), message)
                again = []
            else:
                # No group: this message alone goes as a stream.
                again = self._kept[-1:]
        except _Over as cause:
            self._end_group(str(cause))
        lost = self._control.lost_ranks() if again else frozenset()
        for lacking, each in again:
            # A lost rank relays nothing, so everybody that is left gets the message from here.
            left = (
                dict.fromkeys(_reached_ranks(lacking) - lost, ())
                if lost & _reached_ranks(lacking)
                else lacking
            )
            super().multicast(left, replace(each, meta={**each.meta, _SHARED: None}))
        # The digest is a version's last message.
        self._kept = [] if "digest" in message.meta else self._kept

    def _ensure_group(self, message: Message) -> bool:
        """Return whether there is a group. It is formed before the first bytes, when all members
        are there.

        Raises _Over.
        """
        if self._ended:
            return False
        self._check_members()
        if self._group is None and message.tensors:
            ranks = list(self._audience.ranks)
            if None not in self._control.get_all([f"address/{rank}" for rank in ranks]):
                # By socket: members begin to form the group when this arrives.
                self._announce_broadcast({_SHARED: _FORM})
                self._form_group()
                by = dist.get_default_backend_for_device(self._audience.device)
                self._audience.tell("publication", {"by": f"{by} broadcast", "ranks": ranks})
        return self._group is not None

    def _broadcast_message(self, message: Message) -> bool:
        """Broadcast a bucket, or the end of a version; return False for any other message. Raises
        _Over."""
        if not message.tensors:
            self._announce_broadcast({**message.meta, _SHARED: 0})
            self._wait_for_members()
            return True
        if not is_bucket(message):
            return False
        data = message.tensors["data"]
        self._announce_broadcast({**message.meta, _SHARED: len(data)})
        with self._stage("send"):
            for piece in data.split(_PIECE_BYTES):
                # gloo broadcasts from host memory, NCCL from the device.
                self._broadcast_piece(
                    piece
                    if self._stream is None
                    else piece.to(self._audience.device, non_blocking=True)
                )
        return True

    def _announce_broadcast(self, meta: Mapping[str, object]) -> None:
        for rank in self._audience.ranks[1:]:
            super().send(rank, Message(MessageKind.WEIGHTS, meta))

    def _end_group(self, cause: str) -> None:
        """End the group for the given cause, tell the user once, and send streams from now on."""
        deadline = time.monotonic() + self._limits.verdict_s
        # A collective fails before the launcher has noticed the death that caused it, so wait for
        # the better cause.
        while not (lost := self._lost_members()) and time.monotonic() < deadline:
            if self._closing.is_set() or self._run_finished():  # the rollouts have left
                break
            time.sleep(0.05)
        cause = lost or cause
        self._control.compare_set(_ENDED, "", cause)
        if not self._run_finished():
            said = (
                f"weights are no longer broadcast, because {cause}: they travel as streams from "
                "here on"
            )
            self._audience.tell("warning", {"message": f"network.publication: {said}"})
        self._leave_group()

    # ---- rollouts

    def _receive_message(self, message: Message) -> None:
        shared = message.meta[_SHARED]
        try:
            if shared is None:
                self._deliver_missing(message)
            elif shared == _FORM:
                self._form_group()
            elif self._group is not None:
                self._deliver_missing(
                    self._receive_bucket(message) if "bucket" in message.meta else message
                )
                if "digest" in message.meta:
                    self._wait_for_members()
        except _Over as cause:  # trainer 0 will send this message again, as a stream
            self._control.compare_set(_ENDED, "", f"rank {self._rank}: {cause}")
            self._leave_group()

    def _receive_bucket(self, message: Message) -> Message:
        """Return the message with the bytes that the broadcast brings. Raises _Over."""
        staging, hasher = self._stream is not None, xxhash.xxh3_64()
        data = empty_bytes(message.meta[_SHARED], staging)
        for piece in data.split(_PIECE_BYTES):
            staged = torch.empty_like(piece, device=self._audience.device) if staging else piece
            self._broadcast_piece(staged)
            if staging:
                piece.copy_(staged)  # waits: the hash reads these bytes
            hasher.update(tensor_bytes(piece))
        return replace(message, tensors={"data": data}, digest=hasher.hexdigest())

    def _deliver_missing(self, message: Message) -> None:
        """Deliver a message that this rank lacks."""
        # A digest has no bucket and comes after all of them: inf.
        place = int(message.meta["version"]), float(message.meta.get("bucket", math.inf))
        if place[0] != self._passed[0] or place[1] > self._passed[1]:
            self._passed = place
            meta = {
                key: value for key, value in message.meta.items() if key not in (_SHARED, RELAY)
            }
            self._inbox.put(replace(message, meta=meta))

    # ---- the group

    def _form_group(self) -> None:
        """Form the group. Raises _Over when a member is lost or does not come in time."""
        made: Future[Collectives] = Future()
        threading.Thread(
            target=self._create_group, args=(made,), name="broadcast-group", daemon=True
        ).start()
        self._wait_until(made.done, "join_s")
        if (error := made.exception()) is not None:
            raise _Over(_shorten_error(error))
        self._group = made.result()
        self._wait_for_members("join_s")

    def _create_group(self, made: Future[Collectives]) -> None:
        """Form the group in a thread that may be abandoned, because torch cannot be interrupted
        while it waits."""
        audience = self._audience
        seat = audience.ranks.index(self._rank), len(audience.ranks)
        store = dist.PrefixStore("broadcast/group", audience.store)
        try:
            if self._stream is None:
                limit = timedelta(seconds=self._limits.join_s)
                gloo: Any = dist.ProcessGroupGloo(store, *seat, limit)
                made.set_result(gloo)
            else:  # longer than this link waits: its watchdog would end the whole process
                torch.accelerator.set_device_index(audience.device)
                limit = timedelta(seconds=self._limits.collective_s)
                group = _group_of(audience.device, store, seat, limit)
                # NCCL connects at its first operation, and waits there for all members.
                group.allreduce(torch.ones(1, device=audience.device)).wait()
                made.set_result(group)
        except Exception as error:
            made.set_exception(error)

    def _broadcast_piece(self, data: Tensor) -> None:
        if data.numel():
            self._complete_collective(lambda group: group.broadcast(data, root=0), "silent_s")

    def _wait_for_members(self, limit: str = "silent_s") -> None:
        """Wait until every member has made this call. Raises _Over."""
        one = torch.ones(1, device=self._audience.device)
        self._complete_collective(lambda group: group.allreduce(one), limit)

    def _complete_collective(self, begin: Callable[[Collectives], dist.Work], limit: str) -> None:
        if (group := self._group) is None:  # `close` has ended it meanwhile
            raise _Over("this rank leaves")
        try:
            work = begin(group)
            # Polled, because wait() cannot be interrupted when a member is lost.
            self._wait_until(work.is_completed, limit)
            work.wait()
        except (_Over, Aborted, StoreLost):
            raise
        except RuntimeError as error:
            raise _Over(_shorten_error(error)) from error

    def _wait_until(self, done: Callable[[], bool], limit: str) -> None:
        """Wait until `done`, at most for the seconds of the named limit. Raises _Over on a timeout
        or a lost member."""
        seconds = getattr(self._limits, limit)
        began = looked = time.monotonic()
        pause = 0.0001
        while not done():
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                self._control.check_abort()
                self._check_members()
            if now - began > seconds:
                raise _Over(f"nothing has come through for {seconds:.0f} s (limits.{limit})")
            time.sleep(pause)
            pause = min(0.002, 2 * pause)

    def _check_members(self) -> None:
        if self._closing.is_set():
            raise _Over("this rank leaves")
        if (cause := self._control.get(_ENDED)) or (cause := self._lost_members()):
            raise _Over(cause)

    def _lost_members(self) -> str:
        """Return which members are gone, in words; "": none."""
        gone = sorted(self._control.lost_ranks().intersection(self._audience.ranks))
        return f"rank {', '.join(map(str, gone))} is gone" if gone else ""

    def _leave_group(self) -> None:
        """Leave the group. A thread of its own waits for torch to end the operation in progress."""
        group, self._group, self._ended = self._group, None, True
        if group is not None:
            threading.Thread(
                target=_abort_group, args=(group,), name="broadcast-end", daemon=True
            ).start()


def _reached_ranks(routes: Routes) -> set[int]:
    """Return every rank that a message reaches by `routes`.

    Example:
        >>> sorted(_reached_ranks({2: [3, 4], 5: []}))  # 2 relays to 3 and 4
        [2, 3, 4, 5]
    """
    return {rank for first, further in routes.items() for rank in (first, *further)}


def _abort_group(group: Collectives) -> None:
    with suppress(RuntimeError):
        group.abort()


def _shorten_error(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _group_of(
    device: torch.device, store: dist.Store, seat: tuple[int, int], limit: timedelta
) -> Collectives:
    """Return a new group of the backend of this kind of device.

    Raises:
        ValueError: torch has no such backend that can be built outside of its default group.
    """
    name = dist.get_default_backend_for_device(device)
    made = getattr(dist, f"ProcessGroup{name.upper()}", None)
    if made is not None:
        options = made.Options()
        options._timeout = limit
        # NCCL's watchdog would end trainer 0 when a rollout dies in a broadcast: this group only
        # aborts its communicator (2), and the link goes on with streams. The trainers' groups keep
        # their setting; it is read when a group is made.
        usual = os.environ.get(_ON_ERROR)
        os.environ[_ON_ERROR] = "2"
        try:
            return cast(Collectives, made(store, *seat, options))
        finally:
            os.environ.pop(_ON_ERROR)
            if usual is not None:
                os.environ[_ON_ERROR] = usual
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None or plugin.extended_api:
        raise ValueError(f"torch cannot form a group of its own with {name}")
    return cast(Collectives, plugin.creator_fn(store, *seat, limit))


def broadcast_link(
    control: Control,
    world: World,
    session: Session,
    device: torch.device,
    **changes: Any,
) -> SocketLink:
    """Return the link of a rank in a run that publishes by broadcast, with `changes` to the
    arguments of `SocketLink`. Trainer 0 and the rollouts that the run began with are the audience;
    other ranks have sockets alone."""
    ranks = (0, *world.rollout_ranks)
    if world.rank not in ranks:
        return socket_link(control, world, session, device, **changes)
    audience = Audience(ranks, control.store, device, partial(append_event, session.run_dir))
    made: Any = partial(BroadcastLink, audience)
    return socket_link(control, world, session, device, made, **changes)
