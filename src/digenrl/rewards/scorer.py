"""Score off the critical path: a rollout rank submits a task's media and goes on generating the
next task.

One thread takes waiting tasks, joins tasks of equal shape into one batch (if `max_batch` allows),
skips samples that it has scored before, and fulfils a future per task.

The number of waiting tasks is bounded, and `submit` blocks at the bound. So a scorer that is slower
than generation visibly slows generation down, and memory does not grow.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from digenrl import accelerator
from digenrl.rewards.suite import RewardSuite
from digenrl.types import Prompt

Scores = dict[str, Tensor]
_Key = tuple[bytes, int, bool] | None
"""(hash of a sample, prompt's uid, whether held-out rewards are included); None = scores are not
kept."""


@dataclass(frozen=True)
class _Task:
    media: Tensor
    prompts: tuple[Prompt, ...]
    heldout: bool
    future: Future[Scores] = field(default_factory=Future)

    @property
    def kind(self) -> tuple[object, ...]:
        """Key of tasks that may share a batch."""
        return (tuple(self.media.shape[1:]), self.heldout)


class AsyncScorer:
    """`RewardSuite.score` behind a bounded queue and one thread.

    Args:
        suite: suite that scores. Its `placement`, `pending`, `max_batch` and `cache_size` apply.
            With placement `inline`, `submit` scores at once in the caller's thread.
    """

    def __init__(self, suite: RewardSuite) -> None:
        self.suite = suite
        self._cache: OrderedDict[_Key, dict[str, float]] = OrderedDict()
        self._queue: queue.Queue[_Task | None] = queue.Queue(max(1, suite.pending))
        self._closed = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._device = accelerator.current()
        if suite.placement != "inline":
            self._thread = threading.Thread(target=self._work, name="scorer", daemon=True)
            self._thread.start()

    def submit(
        self, media: Tensor, prompts: Sequence[Prompt], heldout: bool = False
    ) -> Future[Scores]:
        """Return a future of the result or exception of `RewardSuite.score`.

        The call waits without limit for a free place in the queue. The rank's watchdog deals with a
        scorer that hangs.

        Args:
            media: [B, ...] in [0, 1]; copied to the CPU, so the caller may reuse its memory.
            prompts: B prompts.
            heldout: whether to score the held-out rewards too.

        Raises:
            ValueError: not one prompt per sample.
            RuntimeError: closed.
        """
        if self._closed:
            raise RuntimeError("The scorer is closed: it takes no more tasks.")
        if len(media) != len(prompts):
            raise ValueError(
                f"{len(media)} samples but {len(prompts)} prompts: pass one prompt per sample."
            )
        copy = media.detach().to("cpu", torch.float32, copy=True)
        task = _Task(copy, tuple(prompts), heldout)
        if self._thread is None:
            self._score([task])
            return task.future
        self._queue.put(task)
        return task.future

    def close(self, timeout_s: float = 10.0) -> None:
        """Cancel waiting tasks, let the running batch finish (up to `timeout_s`) and close the
        suite. Idempotent."""
        self._closed = True
        if self._thread is not None and self._thread.is_alive():
            self._drain()
            self._queue.put(None)
            self._thread.join(timeout_s)
        self._drain()
        self.suite.close()

    def _drain(self) -> None:
        while True:
            try:
                task = self._queue.get_nowait()
            except queue.Empty:
                return
            if task is not None:
                task.future.cancel()

    def _work(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.set_device_index(self._device)  # a new thread begins on device 0
            # A stream of its own: on the default one, scoring would queue behind the generation
            # that it is to overlap.
            torch.accelerator.set_stream(torch.Stream(self._device))
        carried: _Task | None = None
        while True:
            first = carried or self._queue.get()
            if first is None:
                return
            batch, carried, closing = self._gather(first)
            self._score(batch)
            if closing:
                return

    def _gather(self, first: _Task) -> tuple[list[_Task], _Task | None, bool]:
        """Return (tasks to score together, next task of another kind or None, whether the end
        came). Never waits."""
        batch, samples = [first], len(first.prompts)
        while samples < self.suite.max_batch:
            try:
                task = self._queue.get_nowait()
            except queue.Empty:
                break
            if task is None:
                return batch, None, True
            if task.kind != first.kind or samples + len(task.prompts) > self.suite.max_batch:
                return batch, task, False
            batch.append(task)
            samples += len(task.prompts)
        return batch, None, False

    def _score(self, batch: list[_Task]) -> None:
        batch = [task for task in batch if task.future.set_running_or_notify_cancel()]
        if not batch:
            return
        try:
            results = self._score_cached(batch)
        except BaseException as error:
            # The caller of `result()` is who can act on it; this thread must live on for the other
            # tasks.
            for task in batch:
                task.future.set_exception(error)
            return
        for task, result in zip(batch, results, strict=True):
            task.future.set_result(result)

    def _score_cached(self, batch: list[_Task]) -> list[Scores]:
        media = torch.cat([task.media for task in batch])
        prompts = [prompt for task in batch for prompt in task.prompts]
        heldout = batch[0].heldout
        keys = self._keys(media, prompts, heldout)
        known = {row: self._cache[key] for row, key in enumerate(keys) if key in self._cache}
        for row in known:
            self._cache.move_to_end(keys[row])
        if fresh := [row for row in range(len(prompts)) if row not in known]:
            scores = self.suite.score(media[fresh], [prompts[row] for row in fresh], heldout)
            for position, row in enumerate(fresh):
                known[row] = {name: values[position].item() for name, values in scores.items()}
                self._remember(keys[row], known[row])
        rows = iter(range(len(prompts)))
        return [_columns([known[next(rows)] for _ in task.prompts]) for task in batch]

    def _keys(self, media: Tensor, prompts: Sequence[Prompt], heldout: bool) -> list[_Key]:
        if not self.suite.cache_size:
            return [None] * len(prompts)
        shape = str(tuple(media.shape[1:])).encode()
        return [
            (
                hashlib.blake2b(sample.numpy().tobytes(), digest_size=16, key=shape[:64]).digest(),
                prompt.uid,
                heldout,
            )
            for sample, prompt in zip(media, prompts, strict=True)
        ]

    def _remember(self, key: _Key, scores: dict[str, float]) -> None:
        """Keep complete scores only. A missing score is asked for again."""
        if key is None or any(value != value for value in scores.values()):
            return
        self._cache[key] = scores
        if len(self._cache) > self.suite.cache_size:
            self._cache.popitem(last=False)


def _columns(rows: list[dict[str, float]]) -> Scores:
    return {
        name: torch.tensor([row[name] for row in rows], dtype=torch.float32) for name in rows[0]
    }
