"""Keep loggers from stopping or slowing a run. metrics.jsonl is complete without them."""

from __future__ import annotations

import csv
import math
import os
import queue
import threading
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyExperiment

from digenrl.record.run_dir import LOGGER, append_event


class Guarded(Logger):
    """Logger that calls another logger in a separate thread.

    Exceptions of the other logger are counted. While it is slow or hangs, lines wait, or are
    dropped and counted. The first failure, and the number of failures at the end, become events of
    kind "logger".

    Args:
        logger: the other logger.
        key: name of the other logger in the configuration.
        run_dir: run directory for the events.
        pending: most calls that may wait.
        finish_s: seconds that the logger gets at the end for the waiting calls.
        updates: optimizer updates of an RL step. Lightning counts updates; the other logger gets RL
            steps, as metrics.jsonl and reports have them.
    """

    def __init__(
        self,
        logger: Logger,
        key: str,
        run_dir: str | Path,
        pending: int = 1000,
        finish_s: float = 30.0,
        updates: int = 1,
    ) -> None:
        super().__init__()
        self._logger, self._key, self._run_dir, self._finish_s = logger, key, run_dir, finish_s
        self._calls: queue.Queue[Callable[[], Any]] = queue.Queue(pending)
        self._updates = updates
        # Lightning opens the experiment from its own thread, maybe while a call waits here.
        self._opening = threading.Lock()
        self._lock = threading.Lock()
        self._untold, self._failed = 0, False
        threading.Thread(target=self._run_calls, name=f"logger-{key}", daemon=True).start()

    @property
    def name(self) -> str | None:
        return self._logger.name

    @property
    def version(self) -> int | str | None:
        return self._logger.version

    @property
    def save_dir(self) -> str | None:
        return self._logger.save_dir

    @property
    def experiment(self) -> Any:
        """The other logger's experiment. Its use is not guarded."""
        with self._opening:
            return self._logger.experiment  # type: ignore[attr-defined]

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        rl_step = self._rl_step(step, metrics.get("epoch"))
        self._queue_call(lambda: self._logger.log_metrics(dict(metrics), rl_step))

    def log_pictures(self, show: Callable[[Logger, int], None], step: int) -> None:
        """Call `show` with the other logger and the RL step."""
        rl_step = math.ceil(step / self._updates)
        self._queue_call(lambda: show(self._logger, rl_step))

    def _rl_step(self, step: int | None, epoch: float | None) -> int | None:
        """Return the RL step of `step` updates. Lightning adds its epoch, which is an RL step, to
        what it logs by itself."""
        if epoch is not None:
            return int(epoch) + 1
        return None if step is None else math.ceil(step / self._updates)

    def log_hyperparams(
        self, params: dict[str, object] | Namespace, *args: object, **kwargs: object
    ) -> None:
        self._queue_call(lambda: self._logger.log_hyperparams(params, *args, **kwargs))

    def save(self) -> None:
        self._queue_call(self._logger.save)

    def finalize(self, status: str) -> None:
        """Let the logger write the waiting calls, for `finish_s` seconds at most."""
        deadline, done = time.monotonic() + self._finish_s, threading.Event()
        try:
            self._calls.put(lambda: self._logger.finalize(status), timeout=self._finish_s)
            self._calls.put(done.set, timeout=max(0.0, deadline - time.monotonic()))
            done.wait(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass
        if not done.is_set():
            self._count_failures(
                self._calls.qsize() + 1,
                f"calls did not end within {self._finish_s:g} s of the run's end",
            )
        self._report_failures(None)

    def _queue_call(self, call: Callable[[], object]) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._count_failures(
                1, f"slower than the run: {self._calls.maxsize} calls wait already"
            )

    def _run_calls(self) -> None:
        while True:
            call = self._calls.get()
            try:
                with self._opening:
                    getattr(self._logger, "experiment", None)
                call()
            except Exception as error:  # whatever a logger raises, it is no reason to end a run
                self._count_failures(1, f"{type(error).__name__}: {error}")

    def _count_failures(self, calls: int, cause: str) -> None:
        with self._lock:
            first, self._failed = not self._failed, True
            self._untold += calls
        if first:
            self._report_failures(cause)

    def _report_failures(self, cause: str | None) -> None:
        with self._lock:
            calls, self._untold = self._untold, 0
        if calls:
            append_event(
                self._run_dir, LOGGER, {"logger": self._key, "failures": calls, "cause": cause}
            )


class Silent(Logger):
    """Logger that discards everything, for ranks whose metrics rank 0 logs."""

    name, version = "", ""

    @property
    def experiment(self) -> DummyExperiment:
        """An object of which every method does nothing."""
        return DummyExperiment()

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Discard the metrics."""

    def log_hyperparams(self, params: object, *args: object, **kwargs: object) -> None:
        """Discard the settings."""


def continue_record(logger: Logger) -> None:
    """Let a logger go on with what an earlier attempt of the run wrote.

    Lightning's CSV logger deletes the rows that it finds, and its files of hyperparameters stay as
    they were first written.
    """
    if isinstance(logger, (CSVLogger, TensorBoardLogger)):
        Path(logger.log_dir, "hparams.yaml").unlink(missing_ok=True)
    if not isinstance(logger, CSVLogger):
        return
    rows = Path(logger.log_dir, "metrics.csv")
    kept = rows.with_suffix(".kept")  # also of an attempt that died in these lines
    if rows.exists():
        os.replace(rows, kept)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a folder that is not empty
        writer = logger.experiment
    if kept.exists():
        with kept.open(newline="", encoding="utf-8") as file:
            writer.metrics_keys = next(csv.reader(file), [])
        os.replace(kept, rows)
