"""When checkpoints are written, and what only the system knows about a run: RNG state and the in-flight version."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from digenrl.record.run_dir import append_event
from digenrl.types import StepGivenUp

KEY = "digenrl"
"""Our entry in Lightning's checkpoint dictionary."""


class Checkpoint(pl.Callback):
    """Writes `checkpoints/step-<n>` every `every` RL steps and at the end of the run, a requested stop included: where
    the step in progress is given up (`StepGivenUp`), the version before it.

    The run's directory is the Trainer's `default_root_dir`.
    """

    def __init__(self, every: int = 5) -> None:
        if every < 1:
            raise ValueError(f"callbacks.checkpoint.every = {every}: use at least 1 RL step.")
        self._every, self._failures = every, 0
        self._finished, self._saved = 0, 0
        """RL steps finished, and those in the newest checkpoint."""
        self._progress: dict[str, Any] = {}
        """Entries of a checkpoint as they were when the last step was finished, but for the weights."""
        self._weights: dict[str, Any] = {}
        """Those of the weights, before the first of several updates."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._finished = self._saved = trainer.current_epoch

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        strategy: Any = trainer.strategy
        several = strategy.updates_done == 0 and strategy.spec.updates_per_batch > 1
        if several and self._finished > self._saved and strategy.engine.policy.lora is not None:
            dumped = _dump(trainer)
            kept = {name: dumped[name] for name in ("state_dict", "optimizer_states", "algorithm")}
            self._weights = tree_map(lambda leaf: leaf.to("cpu", copy=True) if torch.is_tensor(leaf) else leaf, kept)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, StepGivenUp):
            return
        version = trainer.strategy.version  # type: ignore[attr-defined]
        if version > self._finished:  # the evaluation after that step was given up
            self._save(trainer, version, trainer.save_checkpoint)
        elif self._finished > self._saved:
            self._save(trainer, self._finished, partial(self._save_finished, trainer))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        step = trainer.current_epoch + 1
        self._finished, self._weights = step, {}
        if step % self._every == 0 or step == trainer.max_epochs or trainer.should_stop:
            self._save(trainer, step, trainer.save_checkpoint)
        if self._saved < step:
            self._progress = {
                "epoch": trainer.current_epoch,
                "global_step": trainer.global_step,
                "loops": deepcopy(trainer._checkpoint_connector._get_loops_state_dict()),
                KEY: _own(trainer),
            }

    def _save_finished(self, trainer: pl.Trainer, path: Path) -> None:
        """Write the checkpoint of the last finished step, from the middle of the next one."""
        trainer.strategy.save_checkpoint(_dump(trainer) | self._progress | self._weights, path)
        trainer.strategy.barrier()

    def _save(self, trainer: pl.Trainer, step: int, write: Callable[[Path], None]) -> None:
        path = Path(trainer.default_root_dir) / "checkpoints" / f"step-{step:06d}"
        try:
            write(path)
            self._failures, self._saved = 0, step
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
        checkpoint[KEY] = _own(trainer)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        torch.set_rng_state(checkpoint[KEY]["rng"])
        trainer.strategy.previous = checkpoint[KEY]["previous"] or None  # type: ignore[attr-defined]
        trainer.strategy.shares.load(checkpoint[KEY].get("shares", {}))  # type: ignore[attr-defined]

    def _event(self, trainer: pl.Trainer, kind: str, facts: dict[str, Any]) -> None:
        if trainer.is_global_zero:
            append_event(trainer.default_root_dir, kind, facts)


def _own(trainer: pl.Trainer) -> dict[str, Any]:
    strategy: Any = trainer.strategy
    return {
        "rng": torch.get_rng_state(),
        "version": strategy.version,
        "previous": strategy.previous or {},
        "shares": strategy.shares.state(strategy.version),
    }


def _dump(trainer: pl.Trainer) -> dict[str, Any]:
    """The checkpoint of this moment. A collective of the trainers where weights are sharded."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
