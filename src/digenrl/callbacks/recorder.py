"""Recorder of the trainers' metrics and events in the run directory."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from digenrl.record.run_dir import METRICS, append_event, append_jsonl, hold_reserve, unix_time
from digenrl.report.alarms import clipped_alarm
from digenrl.types import StepGivenUp

_LOG = logging.getLogger(__name__)


class Recorder(pl.Callback):
    """Callback that writes a line of metrics.jsonl per RL step (a Lightning epoch), and the
    trainers' events.

    Global rank zero writes the metrics, and every rank its own failure. The recorder is always on,
    whatever loggers are configured. The run's directory is the Trainer's `default_root_dir`.
    """

    def __init__(self) -> None:
        self._step_began = time.monotonic()
        self._first_epoch_of_fit: int | None = None
        self._told_clipped = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step_began = time.monotonic()
        self._first_epoch_of_fit = trainer.current_epoch
        if trainer.is_global_zero:
            hold_reserve(trainer.default_root_dir)
            kind = "resume" if trainer.current_epoch or trainer.global_step else "start"
            facts = {"rl_step": trainer.current_epoch, "trainers": trainer.world_size}
            append_event(trainer.default_root_dir, kind, facts)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Read on every rank: a metric logged with sync_dist=True is reduced by a collective when it
        # is read.
        metrics = scalar_metrics(trainer.callback_metrics)
        if trainer.current_epoch == self._first_epoch_of_fit:
            metrics.update(_first_ratio_deviation(trainer, pl_module))
        now = time.monotonic()
        elapsed, self._step_began = now - self._step_began, now
        if not trainer.is_global_zero:
            return
        clipped = metrics.get("clip_fraction/first", 0.0)
        if clipped > 0 and not self._told_clipped:  # once: the report tells the largest share
            self._told_clipped = True
            _LOG.warning(clipped_alarm(clipped))
        if trainer.optimizers:
            metrics.setdefault("lr", float(trainer.optimizers[0].param_groups[0]["lr"]))
        # What the strategy knows of the step: samples, samples_per_s, staleness_max,
        # predicted_step_s, bubble, ...
        facts: dict[str, Any] = {
            "step_s": elapsed,
            **getattr(trainer.strategy, "step_facts", dict)(),
        }
        line = {
            "kind": "step",
            "rl_step": trainer.current_epoch + 1,
            "time": unix_time(),
            **metrics,
            **facts,
        }
        append_jsonl(Path(trainer.default_root_dir) / METRICS, line)
        for logger in trainer.loggers:
            logger.log_metrics(
                {name: facts[name] for name in sorted(facts) if _is_pace(name)}, trainer.global_step
            )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            early = (
                trainer.should_stop
                and trainer.max_epochs is not None
                and trainer.current_epoch < trainer.max_epochs
            )
            facts = {
                "rl_step": trainer.current_epoch,
                "cause": "a stop was requested" if early else None,
            }
            append_event(trainer.default_root_dir, "stop", facts)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        interrupted = isinstance(exception, (KeyboardInterrupt, StepGivenUp))
        if interrupted and not trainer.is_global_zero:
            return
        facts = {
            "rl_step": trainer.current_epoch,
            "rank": trainer.global_rank,
            "cause": "interrupted" if interrupted else f"{type(exception).__name__}: {exception}",
        }
        append_event(trainer.default_root_dir, "stop" if interrupted else "failure", facts)


def _is_pace(name: str) -> bool:
    """Return whether a metric is about the run's speed. Loggers get these in addition to the
    algorithm's metrics."""
    return name in ("step_s", "samples_per_s", "predicted_step_s") or name.startswith("bubble/")


def scalar_metrics(metrics: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Return Lightning's scalar metrics, without the `_step` and `_epoch` copies of a name that is
    present itself.

    Example:
        >>> scalar_metrics({"loss": 1.0, "loss_step": 2.0, "kl_epoch": 0.5})
        {'loss': 1.0, 'kl_epoch': 0.5}
    """
    values: dict[str, float] = {}
    for name, value in metrics.items():
        base = name.removesuffix("_step").removesuffix("_epoch")
        if base != name and base in metrics:
            continue
        if isinstance(value, Tensor) and value.numel() != 1:
            continue
        values[name] = float(value)
    return values


def _first_ratio_deviation(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, float]:
    """Return max |ratio - 1| before the first optimizer step over all trainer ranks; {} for
    algorithms without ratios.

    Every rank must call this, because the maximum is a collective of the trainers.
    """
    deviation = getattr(pl_module, "first_ratio_max_dev", None)
    if deviation is None:
        return {}
    local = torch.as_tensor(float(deviation), device=pl_module.device)
    return {"first_ratio_max_dev": float(trainer.strategy.reduce(local, reduce_op="max"))}
