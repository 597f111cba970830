"""When checkpoints are written, and what only the system knows about a run: RNG state and the in-flight version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from digenrl.record.run_dir import append_event

KEY = "digenrl"
"""Our entry in Lightning's checkpoint dictionary."""


class Checkpoint(pl.Callback):
    """Writes `checkpoints/step-<n>` every `every` RL steps and at the end of the run, a requested stop included.

    The run's directory is the Trainer's `default_root_dir`.
    """

    def __init__(self, every: int = 5) -> None:
        if every < 1:
            raise ValueError(f"callbacks.checkpoint.every = {every}: use at least 1 RL step.")
        self._every, self._failures = every, 0

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        step = trainer.current_epoch + 1
        if step % self._every and step != trainer.max_epochs and not trainer.should_stop:
            return
        path = Path(trainer.default_root_dir) / "checkpoints" / f"step-{step:06d}"
        try:
            trainer.save_checkpoint(path)
            self._failures = 0
        except OSError as error:
            self._failures += 1
            self._event(trainer, "checkpoint_failed", {"path": str(path), "cause": str(error)})
            if self._failures >= 3:
                raise OSError(f"three checkpoints in a row could not be written; the last: {error}") from error
            return
        self._event(trainer, "checkpoint", {"path": str(path), "rl_step": step})

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[KEY] = {
            "rng": torch.get_rng_state(),
            "version": trainer.strategy.version,  # type: ignore[attr-defined]
            "previous": trainer.strategy.previous or {},  # type: ignore[attr-defined]
            "shares": trainer.strategy.shares.state(trainer.strategy.version),  # type: ignore[attr-defined]
        }

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        torch.set_rng_state(checkpoint[KEY]["rng"])
        trainer.strategy.previous = checkpoint[KEY]["previous"] or None  # type: ignore[attr-defined]
        trainer.strategy.shares.load(checkpoint[KEY].get("shares", {}))  # type: ignore[attr-defined]

    def _event(self, trainer: pl.Trainer, kind: str, facts: dict[str, Any]) -> None:
        if trainer.is_global_zero:
            append_event(trainer.default_root_dir, kind, facts)
