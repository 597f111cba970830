"""When checkpoints are written, and what only the system knows about a run: RNG state and the in-flight version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from digenrl.record.run_dir import CHECKPOINT_FAILED, append_event, append_urgent, free_space

KEY = "digenrl"
"""Our entry in Lightning's checkpoint dictionary."""


class Checkpoint(pl.Callback):
    """Writes `checkpoints/step-<n>` every `every` RL steps and at the end of the run, a requested stop included.

    A checkpoint that cannot be written costs none of the older ones and leaves nothing behind. The run's directory is
    the Trainer's `default_root_dir`.

    Args:
        every: RL steps between checkpoints.
        on_error: what follows one that could not be written: "stop" ends the run after the step in progress, with the
            cause; "continue" goes on and tries again when the next one is due. The last one of a run always counts.

    Raises:
        ValueError: another value.
    """

    def __init__(self, every: int = 5, on_error: str = "stop") -> None:
        if every < 1:
            raise ValueError(f"callbacks.checkpoint.every = {every}: use at least 1 RL step.")
        if on_error not in ("stop", "continue"):
            raise ValueError(f"callbacks.checkpoint.on_error = {on_error!r}: use stop or continue.")
        self._every, self._on_error = every, on_error

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        step = trainer.current_epoch + 1
        last = step == trainer.max_epochs or trainer.should_stop
        if step % self._every and not last:
            return
        path, cause = Path(trainer.default_root_dir) / "checkpoints" / f"step-{step:06d}", None
        try:
            trainer.save_checkpoint(path)
        except OSError as error:  # raised by global rank zero alone, while the others wait where it would have gone on
            cause = _told(path, error)
            trainer.strategy.barrier("Trainer.save_checkpoint")
        failed = trainer.strategy.reduce_boolean_decision(cause is not None, all=False)
        if failed and (last or self._on_error == "stop"):
            trainer.should_stop = True
        if not trainer.is_global_zero:
            return
        if cause is None:
            append_event(trainer.default_root_dir, "checkpoint", {"path": str(path), "rl_step": step})
            return
        append_urgent(trainer.default_root_dir, CHECKPOINT_FAILED, {"rl_step": step, "cause": cause})
        if trainer.should_stop:
            trainer.strategy.control.request_stop(cause)  # type: ignore[attr-defined]

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


def _told(path: Path, error: OSError) -> str:
    """What could not be written and why, how much is free, and what there is to go on from."""
    newest = path.with_name("last")
    older = f"the newest whole one is {newest.resolve().name}" if newest.exists() else "there is no older one"
    cause = f"{error.strerror or error} ({free_space(path.parents[1])})"
    return f"checkpoint {path.name} could not be written to {path.parent}: {cause}; {older}"
