"""Run a scorer in a separate process, which isolates its threads, its memory and its crashes.

The child, `python -m digenrl.rewards.process`, is the reward service (`service.py`) on a
free port of 127.0.0.1, behind a token that only parent and child know. The child reads {"node":
..., "token": ..., "device": number or null} from its standard input. It answers {"url": ...} on its
standard output, and later {"error": ...} if the scorer fails. The child ends when its standard
input ends, so also when the parent is killed. It leads a process group of its own, which ends with
it: processes that a scorer has started do not stay.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NoReturn, TextIO

from torch import Tensor
from torch.accelerator import device_index

from digenrl import accelerator
from digenrl.rewards.needs import needs_sound
from digenrl.rewards.protocol import (
    Identity,
    RewardError,
    RewardUnavailable,
    build_scorer,
    call_scorer,
    check_scores,
    contain_exits,
    identity_of,
)
from digenrl.rewards.remote import RemoteScorer, Unanswered
from digenrl.types import Prompt, Sound

_LONGEST_LINE = 1 << 16
"""Bytes after which a line of a child is printed though it goes on."""
_UNBOUNDED = 1 << 40
"""Limit of bytes, pixels and seconds in the child: practically none, because the parent is the same
program on the same machine and bounds the time itself."""


class ProcessScorer:
    """Scorer that calls a child process. The child starts on first use, and again after a death.

    Args:
        node: YAML node of the scorer (`_target_` and arguments), plain containers.
        start_s: seconds within which the child must build its scorer.
        call_s: seconds within which a batch must be scored.
        max_deaths: deaths in a row, without a scored batch in between, that end the run.
    """

    def __init__(
        self,
        node: Mapping[str, object],
        start_s: float = 600.0,
        call_s: float = 240.0,
        max_deaths: int = 3,
    ) -> None:
        self._node, self._start_s, self._call_s, self._max_deaths = (
            dict(node),
            start_s,
            call_s,
            max_deaths,
        )
        self.hears = needs_sound(node)
        self._child: subprocess.Popen[str] | None = None
        self._client: RemoteScorer | None = None
        self._identity: Identity | None = None
        self._deaths, self._closed = 0, False
        self._lock = threading.Lock()

    @property
    def model_id(self) -> str:
        """Model id of the scorer in the child, which is started first if necessary."""
        return self._require_identity().model_id

    @property
    def weights_digest(self) -> str:
        """Weights digest of the scorer in the child, which is started first if necessary."""
        return self._require_identity().weights_digest

    def __call__(
        self, media: Tensor, prompts: Sequence[Prompt], sound: Sound | None = None
    ) -> Tensor:
        """Return scores [B].

        Raises:
            RewardUnavailable: the child died or was too slow; it starts again with the next call.
            RewardError: the scorer itself failed, or the child keeps dying.
        """
        with self._lock:
            client = self._ensure_client()
            try:
                scores = client(media, prompts, sound)
            except Unanswered as error:
                self._raise_lost(error, self._call_s)
            except RewardUnavailable:
                # An answer without scores: the child lives.
                self._deaths = 0
                raise
            self._deaths = 0
            return scores

    def close(self) -> None:
        """End the child for good, also while another thread waits until it has started or scored.
        Idempotent."""
        self._closed = True
        if (child := self._child) is not None and child.returncode is None:
            _kill_group(child.pid)  # who waits sees the end of it, and lets go of the lock
        with self._lock:
            self._end_child()

    def _check_open(self) -> None:
        """Raise RewardUnavailable after `close`."""
        if self._closed:
            raise RewardUnavailable(f"The scorer {self._node.get('_target_')} is closed.")

    def _require_identity(self) -> Identity:
        with self._lock:
            self._ensure_client()
            assert self._identity is not None
            return self._identity

    def _ensure_client(self) -> RemoteScorer:
        """Return a client of a child with a built scorer. A restarted child must have the old
        identity."""
        if self._client is not None and self._child is not None and self._child.poll() is None:
            return self._client
        self._end_child()
        self._check_open()
        # `auto` in the child is this rank's device; torch numbers devices alike in both.
        return self._connect_client(
            *self._spawn_child(self._node, accelerator.current_device().index)
        )

    def _spawn_child(
        self,
        node: Mapping[str, object],
        device: int | None,
        held: Sequence[int] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[str, str]:
        """Start a child, which keeps the descriptors `held` open, with further variables. Return
        its URL and token once its scorer is built."""
        token = secrets.token_urlsafe(32)
        printed, printing = os.pipe()
        threading.Thread(target=_pass_on, args=(printed,), daemon=True).start()
        self._child = subprocess.Popen(
            # -P: no file of the working directory hides a module.
            [sys.executable, "-P", "-m", "digenrl.rewards.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printing,
            text=True,
            start_new_session=True,
            pass_fds=held,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                **environment,
            },
        )
        os.close(printing)
        if self._closed:  # since the last look, and `close` saw no child
            _kill_group(self._child.pid)
        assert self._child.stdin is not None
        try:
            asked = {"node": node, "token": token, "device": device}
            print(json.dumps(asked), file=self._child.stdin, flush=True)
            return self._read_answer(self._start_s)["url"], token
        except (OSError, KeyError) as error:
            self._raise_lost(error, self._start_s)

    def _connect_client(self, url: str, token: str) -> RemoteScorer:
        """Return a client of a child, which must have the identity of its predecessors."""
        pinned: dict[str, Any] = {} if self._identity is None else vars(self._identity)
        self._client = RemoteScorer(
            [url], self._call_s, self._call_s, max_attempts=1, token=token, **pinned
        )
        try:
            self._identity = self._client.pinned_identity()
        except Unanswered as error:
            self._raise_lost(error, self._call_s)
        return self._client

    def _read_answer(self, seconds: float) -> dict[str, str]:
        """Return the child's next line; {} if the child ended before.

        Raises TimeoutError, and RewardError if the line reports an error.
        """
        assert self._child is not None
        assert self._child.stdout is not None
        if not select.select([self._child.stdout], [], [], seconds)[0]:
            raise TimeoutError
        told: dict[str, str] = json.loads(self._child.stdout.readline() or "{}")
        if "error" in told:
            self._end_child()
            raise RewardError(
                f"The scorer {self._node.get('_target_')} failed in its process: {told['error']}"
            )
        return told

    def _raise_lost(self, error: Exception, seconds: float) -> NoReturn:
        """End a child that did not answer, and raise the cause."""
        code: int | None = None
        if self._child is not None:
            with suppress(subprocess.TimeoutExpired):
                code = self._child.wait(0.5)
                # A child that reported the cause before it died: this raises it.
                self._read_answer(0.0)
        self._deaths += 1
        self._end_child()
        what = (
            f"did not answer within {seconds:g} s (reward.start_s, reward.call_s)"
            if code is None
            else f"died (exit code {code})"
        )
        message = f"The process of scorer {self._node.get('_target_')} {what}"
        if self._deaths >= self._max_deaths:
            raise RewardError(
                f"{message}, {self._deaths} times in a row: run it inline to see why."
            ) from error
        raise RewardUnavailable(f"{message}; it starts again with the next batch.") from error

    def _end_child(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._child is not None:
            _kill_group(self._child.pid)
            # Reaps the child and closes its pipes.
            self._child.communicate()
            self._child = None


def _pass_on(printed: int) -> None:
    """Write what a child prints, and what it has started, to this process's standard error, line by
    line: a rank's masks secrets there."""
    rest = b""
    with suppress(OSError), os.fdopen(printed, "rb", buffering=0) as pipe:
        while block := pipe.read(1 << 16):
            *lines, rest = (rest + block).split(b"\n")
            if len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                _print_line(line)
    if rest:
        _print_line(rest)


def _print_line(line: bytes) -> None:
    with suppress(OSError, ValueError):  # a stream that is closed
        print(line.decode(errors="backslashreplace"), file=sys.stderr, flush=True)


class _Reporting:
    """Scorer of the child, which reports a failure to the parent and then ends the process."""

    def __init__(self, node: Mapping[str, object], device: int | None, answers: TextIO) -> None:
        self._device, self._answers = device, answers
        try:
            with device_index(self._device), contain_exits(str(node.get("_target_"))):
                self._scorer = build_scorer(node)
            identity = identity_of(self._scorer)
        except Exception as error:
            self.report_failure(error)
        self.model_id, self.weights_digest = identity.model_id, identity.weights_digest
        self.hears = needs_sound(self._scorer)

    def __call__(
        self, media: Tensor, prompts: Sequence[Prompt], sound: Sound | None = None
    ) -> Tensor:
        try:
            # The service calls from threads of its own, and a new thread begins on device 0.
            with device_index(self._device), contain_exits(self.model_id):
                answer = call_scorer(self._scorer, media, prompts, sound)
                return check_scores(self.model_id, answer, len(prompts))
        except RewardUnavailable:
            raise
        except Exception as error:
            self.report_failure(error)

    def report_failure(self, error: Exception) -> NoReturn:
        """Report an error to the parent and end the process."""
        self.send_answer({"error": f"{type(error).__name__}: {error}"})
        _kill_group(os.getpid())
        os._exit(1)

    def send_answer(self, answer: Mapping[str, str]) -> None:
        """Write a line to the parent."""
        print(json.dumps(answer), file=self._answers, flush=True)


def _end_with_parent() -> None:
    """End the process when its standard input ends. A thread waits for this, because a scorer may
    compute for minutes."""
    sys.stdin.read()
    _kill_group(os.getpid())
    os._exit(1)


def _kill_group(leader: int) -> None:
    """Kill a child and everything that it has started. The group outlives its leader."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def main() -> None:
    """Build the scorer and serve it to one parent, until the parent ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # a group gets them; the rank still finishes its step
    asked = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # The pipe to the parent moves to another descriptor, out of reach of a scorer's prints.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a scorer prints belongs to the run's log
    scorer = _Reporting(asked["node"], asked["device"], answers)
    try:
        from digenrl.rewards.service import RewardService, ServiceLimits, serve_rewards
    except ImportError as error:
        scorer.report_failure(error)
    most = _UNBOUNDED
    # Every rank of a machine may ask a judge at once, and each waits its turn.
    limits = ServiceLimits(
        most,
        max_samples=1 << 20,
        max_pixels=most,
        max_pending=1 << 10,
        max_connections=1 << 10,
        body_s=most,
        score_s=most,
    )
    serve_rewards(
        RewardService(scorer, limits, asked["token"]),
        "127.0.0.1",
        0,
        lambda url: scorer.send_answer({"url": url}),
    )


if __name__ == "__main__":
    main()
