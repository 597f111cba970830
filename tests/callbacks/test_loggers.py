"""A logger that raises, hangs or is slow costs the run neither its life nor a step's time, and is
counted."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from digenrl.callbacks.loggers import Guarded
from digenrl.record.run_dir import append_event
from digenrl.report.read_run import read_run
from digenrl.report.summary import build_summary


class Troubled(Logger):
    """Notes what it is given; before that it raises, or waits until `gate` is set."""

    name, version = "troubled", 0

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error, self.gate = error, threading.Event()
        self.steps: list[int | None] = []
        if error is not None:
            self.gate.set()

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.gate.wait()
        if self.error is not None:
            raise self.error
        self.steps.append(step)


def counted(run_dir: Path) -> dict[str, int]:
    append_event(run_dir, "end", {"status": "completed"})
    loggers: dict[str, int] = build_summary(read_run(run_dir))["loggers"]
    return loggers


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def test_what_a_logger_raises_is_counted_and_said_twice(tmp_path: Path) -> None:
    logger = Guarded(Troubled(ConnectionError("lost")), "wandb", tmp_path)
    for step in range(50):
        logger.log_metrics({"reward": 0.5}, step)
    logger.finalize("success")
    assert [event["cause"] for event in events(tmp_path)] == ["ConnectionError: lost", None]
    assert counted(tmp_path) == {"wandb": 50}


def test_a_logger_that_hangs_costs_no_step_and_the_end_no_more_than_it_gets(tmp_path: Path) -> None:
    inner = Troubled()
    logger = Guarded(inner, "wandb", tmp_path, pending=10, finish_s=0.2)
    began = time.monotonic()
    for step in range(1000):
        logger.log_metrics({"reward": 0.5}, step)
    assert time.monotonic() - began < 1.0
    logger.finalize("success")
    assert time.monotonic() - began < 2.0
    assert events(tmp_path)[0]["cause"] == "slower than the run: 10 calls wait already"
    assert counted(tmp_path)["wandb"] >= 1000 - 10
    inner.gate.set()


def test_a_slow_logger_gets_every_line_in_order(tmp_path: Path) -> None:
    inner = Troubled()
    logger = Guarded(inner, "csv", tmp_path)
    for step in range(20):
        logger.log_metrics({"reward": 0.5}, step)
    threading.Timer(0.2, inner.gate.set).start()
    logger.finalize("success")
    assert inner.steps == list(range(20))
    assert counted(tmp_path) == {}
