"""A scorer in a process of its own: its threads, its memory and its crashes stay there.

Parent and child share a socket pair and exchange `digenrl.rewards.frames`. The child builds the scorer from its
YAML node, so nothing is pickled in either direction, and ends when the socket does.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from digenrl.rewards import frames
from digenrl.rewards.protocol import Identity, RewardError, RewardUnavailable
from digenrl.types import Prompt

_CHUNK = 1 << 20


class ProcessScorer:
    """Calls a scorer that runs in a child process; starts it on first use, and again after it died.

    Args:
        node: YAML node of the scorer (`_target_` and arguments), plain containers.
        start_s: longest time until the child has built its scorer.
        call_s: longest time for one batch.
        max_deaths: deaths in a row, without one batch in between, that end the run.
    """

    def __init__(
        self, node: Mapping[str, Any], start_s: float = 600.0, call_s: float = 300.0, max_deaths: int = 3
    ) -> None:
        self._node, self._start_s, self._call_s, self._max_deaths = dict(node), start_s, call_s, max_deaths
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._identity: Identity | None = None
        self._deaths = 0
        self._lock = threading.Lock()

    @property
    def model_id(self) -> str:
        """That of the scorer in the child, which is started if need be."""
        return self._identified().model_id

    @property
    def weights_digest(self) -> str:
        """That of the scorer in the child, which is started if need be."""
        return self._identified().weights_digest

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """[B] scores.

        Raises:
            RewardUnavailable: the child died or was too slow; it starts again with the next call.
            RewardError: the scorer itself failed, or the child keeps dying.
        """
        with self._lock:
            self._start()
            frame = frames.encode_request(media, prompts, uuid.uuid4().hex)
            kind, payload = self._exchange(frame, self._call_s)
            self._deaths = 0
        if kind["kind"] == "unavailable":
            raise RewardUnavailable(kind["message"])
        scores = np.frombuffer(payload, dtype=np.float32)
        return torch.from_numpy(scores.copy())

    def close(self) -> None:
        """Ends the child. Idempotent."""
        with self._lock:
            self._end()

    def _identified(self) -> Identity:
        with self._lock:
            self._start()
            assert self._identity is not None
            return self._identity

    def _start(self) -> None:
        """A child with a built scorer, or an error. The identity of a restarted child must be the old one."""
        if self._child is not None and self._child.poll() is None:
            return
        self._end()
        here, there = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with there:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "digenrl.rewards.process_worker", str(there.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
                pass_fds=(there.fileno(),),
                env=environment,
            )
        self._socket = here
        answer, _ = self._exchange(frames.encode_frame(json.dumps(self._node)), self._start_s)
        identity = Identity(answer["model_id"], answer["weights_digest"])
        if self._identity not in (None, identity):
            raise RewardError(f"The scorer's process came back as {identity}, it was {self._identity}.")
        self._identity = identity

    def _exchange(self, frame: bytes, seconds: float) -> tuple[dict[str, Any], bytes]:
        """One frame out, one in."""
        assert self._socket is not None
        deadline = time.monotonic() + seconds
        try:
            send(self._socket, frame, deadline)
            document, payload = receive(self._socket, deadline)
        except (OSError, EOFError, frames.WireError) as error:
            self._lost(error, seconds)
        answer = json.loads(document)
        if answer["kind"] == "error":
            self._end()
            raise RewardError(f"The scorer {self._node.get('_target_')} failed in its process: {answer['message']}")
        return answer, payload

    def _lost(self, error: Exception, seconds: float) -> None:
        self._deaths += 1
        code = self._child.poll() if self._child is not None else None
        self._end()
        what = f"did not answer within {seconds:g} s" if isinstance(error, TimeoutError) else f"died (exit code {code})"
        message = f"The process of scorer {self._node.get('_target_')} {what}"
        if self._deaths >= self._max_deaths:
            raise RewardError(f"{message}, {self._deaths} times in a row: run it inline to see why.") from error
        raise RewardUnavailable(f"{message}; it starts again with the next batch.") from error

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._child is not None:
            try:
                self._child.wait(0.5)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
            self._child = None


def send(connection: socket.socket, frame: bytes, deadline: float) -> None:
    """Sends all of `frame`; raises TimeoutError at `deadline` (monotonic)."""
    view = memoryview(frame)
    while view:
        connection.settimeout(_left(deadline))
        view = view[connection.send(view[:_CHUNK]) :]


def receive(connection: socket.socket, deadline: float | None) -> tuple[bytes, bytes]:
    """(json, payload) of one frame. Raises TimeoutError at `deadline`, EOFError when the peer is gone, WireError."""
    lengths = frames.parse_header(bytes(_receive_exactly(connection, frames.HEADER.size, deadline)))
    return bytes(_receive_exactly(connection, lengths[0], deadline)), bytes(
        _receive_exactly(connection, lengths[1], deadline)
    )


def _receive_exactly(connection: socket.socket, count: int, deadline: float | None) -> bytearray:
    raw = bytearray(count)
    view = memoryview(raw)
    while view:
        connection.settimeout(None if deadline is None else _left(deadline))
        got = connection.recv_into(view)
        if not got:
            raise EOFError("the peer closed the connection")
        view = view[got:]
    return raw


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("deadline passed")
    return left


def _has_descriptor(stream: Any) -> bool:
    try:
        return stream.fileno() >= 0
    except (OSError, AttributeError, ValueError):
        return False
