"""Score off the critical path: a rollout rank submits a task's media and goes on generating the
next task.

One thread takes waiting tasks one by one, and fulfils a future per task. Tasks are not joined, so
that no score depends, in its last bits, on the tasks that happened to wait together.

The number of waiting tasks is bounded, and `submit` blocks at the bound. So a scorer that is slower
than generation visibly slows generation down, and memory does not grow.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from digenrl import accelerator
from digenrl.rewards.suite import RewardSuite
from digenrl.types import Prompt, Sound, move_tensors

Scores = dict[str, Tensor]


@dataclass(frozen=True)
class _Task:
    media: Tensor
    prompts: tuple[Prompt, ...]
    heldout: bool
    sound: Sound | None
    future: Future[Scores] = field(default_factory=Future)


class AsyncScorer:
    """`RewardSuite.score` behind a bounded queue and one thread.

    Args:
        suite: suite that scores. Its `placement` and `pending` apply. With placement `inline`,
            `submit` scores at once in the caller's thread.
    """

    def __init__(self, suite: RewardSuite) -> None:
        self.suite = suite
        self._queue: queue.Queue[_Task | None] = queue.Queue(max(1, suite.pending))
        self._closed = False
        self._thread: threading.Thread | None = None
        self._device = accelerator.current_device()
        if suite.placement != "inline":
            self._thread = threading.Thread(target=self._score_tasks, name="scorer", daemon=True)
            self._thread.start()

    def submit(
        self,
        media: Tensor,
        prompts: Sequence[Prompt],
        heldout: bool = False,
        sound: Sound | None = None,
    ) -> Future[Scores]:
        """Return a future of the result or exception of `RewardSuite.score`.

        The call waits without limit for a free place in the queue. The rank's watchdog deals with a
        scorer that hangs.

        Args:
            media: [B, ...] in [0, 1]; copied to the CPU, so the caller may reuse its memory.
            prompts: B prompts.
            heldout: whether to score the held-out rewards too.
            sound: sound of the samples, which moves to the CPU; None = not asked for.

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
        task = _Task(copy, tuple(prompts), heldout, move_tensors(sound, "cpu"))
        if self._thread is None:
            self._score_task(task)
            return task.future
        self._queue.put(task)
        return task.future

    def close(self, timeout_s: float = 10.0) -> None:
        """Cancel waiting tasks, let the running batch finish (up to `timeout_s`) and close the
        suite. Idempotent."""
        self._closed = True
        self.suite.stop_waiting()
        if self._thread is not None and self._thread.is_alive():
            self._cancel_waiting()
            self._queue.put(None)
            self._thread.join(timeout_s)
        self.suite.close()

    def _cancel_waiting(self) -> None:
        while True:
            try:
                task = self._queue.get_nowait()
            except queue.Empty:
                return
            if task is not None:
                task.future.cancel()

    def _score_tasks(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.set_device_index(self._device)  # a new thread begins on device 0
            # A stream of its own: on the default one, scoring would queue behind the generation
            # that it is to overlap.
            torch.accelerator.set_stream(torch.Stream(self._device))
        while (task := self._queue.get()) is not None:
            self._score_task(task)

    def _score_task(self, task: _Task) -> None:
        if not task.future.set_running_or_notify_cancel():
            return
        try:
            scores = self.suite.score(task.media, task.prompts, task.heldout, task.sound)
            task.future.set_result(scores)
        except BaseException as error:
            # The caller of `result()` is who can act on it; this thread must live on for the other
            # tasks.
            task.future.set_exception(error)
