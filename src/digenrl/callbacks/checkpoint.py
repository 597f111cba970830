"""Write checkpoints when they are due, with the state that Lightning lacks: RNG state, the previous
version's weights, the trainers' shares."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from digenrl.record.run_dir import CHECKPOINT_FAILED, append_event, free_space
from digenrl.types import StepGivenUp

KEY = "digenrl"
"""Key of our entry in Lightning's checkpoint dictionary."""


class Checkpoint(pl.Callback):
    """Callback that writes `checkpoints/step-<n>` every `every` RL steps and at the end of the run.

    The end includes a requested stop, and a stop by another callback (EarlyStopping, Timer). If the
    step in progress is given up (`StepGivenUp`), the checkpoint is of the version before it.

    One checkpoint at a time is written beside training. The next checkpoint and the end of the run
    wait for it. A checkpoint that cannot be written leaves nothing behind, and older checkpoints
    stay. The run's directory is the Trainer's `default_root_dir`.

    Args:
        every: RL steps between checkpoints.
        on_error: action after a checkpoint that could not be written. "stop" ends the run after the
            step in progress, with the cause, and tries to save this step. "continue" goes on and
            tries again when the next checkpoint is due. A failure of the run's last checkpoint
            always counts.
        retry_s: seconds for which the last checkpoint of a run is tried again, after pauses of 1,
            2, 4 ... seconds; 0 = never.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, every: int = 5, on_error: str = "stop", retry_s: float = 15.0) -> None:
        if every < 1:
            raise ValueError(f"callbacks.checkpoint.every = {every}: use at least 1 RL step.")
        if on_error not in ("stop", "continue"):
            raise ValueError(f"callbacks.checkpoint.on_error = {on_error!r}: use stop or continue.")
        if retry_s < 0.0:
            raise ValueError(f"callbacks.checkpoint.retry_s = {retry_s}: use 0 or more seconds.")
        self._every, self._on_error, self._pauses = every, on_error, _retry_pauses(retry_s)
        self._finished, self._begun, self._saved = 0, 0, 0
        """Numbers of RL steps: finished, in the newest checkpoint that was begun, in the newest
        whole checkpoint."""
        self._writing: tuple[int, Path, Callable[[Path], None]] | None = None
        """RL steps in the checkpoint that is being written, its path, and the function that writes
        it."""
        self._progress: dict[str, Any] = {}
        """Entries of a checkpoint at the end of the last finished step, without the weights."""
        self._weights: dict[str, Any] = {}
        """Weights, optimizer and algorithm state before the first of several updates, or {}."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._finished = self._begun = self._saved = trainer.current_epoch

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        # So that giving the step up later can still save the finished step before it. Not for full
        # weights: their step is finished once an update is done (`StopVote`).
        strategy: Any = trainer.strategy
        several = strategy.state.updates_done == 0 and strategy.spec.updates_per_batch > 1
        if (
            several
            and self._finished > self._saved
            and strategy.engine.policy.adapter.lora is not None
        ):
            dumped = _dump_checkpoint(trainer)
            kept = {name: dumped[name] for name in ("state_dict", "optimizer_states", "algorithm")}
            self._weights = tree_map(
                lambda leaf: leaf.to("cpu", copy=True) if torch.is_tensor(leaf) else leaf, kept
            )
            self._weights |= strategy.parts.step.exchange.checkpoint_entry(before=True)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if not isinstance(exception, StepGivenUp):
            return
        self._settle_writing(trainer)
        version = trainer.strategy.state.version  # type: ignore[attr-defined]
        if version > self._finished:  # the evaluation after that step was given up
            self._begin_writing(trainer, version, trainer.save_checkpoint)
        elif self._finished > self._saved:
            self._begin_writing(trainer, self._finished, partial(self._save_finished, trainer))
        self._settle_writing(trainer, last=True)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        step = trainer.current_epoch + 1
        self._finished, self._weights = step, {}
        due = step % self._every == 0 or step == trainer.max_epochs or trainer.should_stop
        if due or self._writing_ended(trainer):
            self._settle_writing(trainer)
        # Again, because `_settle_writing` may have set `should_stop`.
        last = step == trainer.max_epochs or trainer.should_stop
        if due or last:
            self._begin_writing(trainer, step, trainer.save_checkpoint)
        if last:
            self._settle_writing(trainer, last=True)
        if self._saved < step:
            self._progress = {
                "epoch": trainer.current_epoch,
                "global_step": trainer.global_step,
                "loops": deepcopy(trainer._checkpoint_connector._get_loops_state_dict()),
                KEY: _resume_state(trainer),
            }

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # EarlyStopping runs after this callback, so the last step may have no checkpoint yet.
        if self._begun < self._finished:
            self._settle_writing(trainer)
            self._begin_writing(trainer, self._finished, partial(self._save_finished, trainer))
        self._settle_writing(trainer, last=True)

    def _save_finished(self, trainer: pl.Trainer, path: Path) -> None:
        """Write the checkpoint of the last finished step, from the middle of the next one."""
        trainer.strategy.save_checkpoint(
            _dump_checkpoint(trainer) | self._progress | self._weights, path
        )

    def _begin_writing(self, trainer: pl.Trainer, step: int, write: Callable[[Path], None]) -> None:
        path = Path(trainer.default_root_dir) / "checkpoints" / f"step-{step:06d}"
        write(path)
        self._begun, self._writing = step, (step, path, write)

    def _writing_ended(self, trainer: pl.Trainer) -> bool:
        """Return whether the checkpoint in progress is complete or has failed on every trainer."""
        strategy: Any = trainer.strategy
        writing = strategy.parts.checkpoints.writing
        here = writing is None or writing.future.done()
        return self._writing is not None and strategy.reduce_boolean_decision(here, all=True)

    def _settle_writing(self, trainer: pl.Trainer, last: bool = False) -> None:
        """Wait for the checkpoint in progress. The last checkpoint of a run is tried again when it
        fails."""
        if self._writing is None:
            return
        (step, path, write), self._writing = self._writing, None
        cause = _failure_cause(trainer, path)
        if cause is not None:
            if trainer.is_global_zero:
                facts = {"rl_step": step, "cause": cause}
                append_event(trainer.default_root_dir, CHECKPOINT_FAILED, facts, urgent=True)
            # All trainers are told of a failure alike, so all take the same number of pauses.
            for pause in self._pauses if last else ():
                time.sleep(pause)
                write(path)
                if (cause := _failure_cause(trainer, path)) is None:
                    break
        if cause is None:
            self._saved = step
            if trainer.is_global_zero:
                append_event(
                    trainer.default_root_dir, "checkpoint", {"path": str(path), "rl_step": step}
                )
            return
        if last or self._on_error == "stop":
            trainer.should_stop = True
            if trainer.is_global_zero:
                trainer.strategy.control.request_stop(cause)  # type: ignore[attr-defined]

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, object]
    ) -> None:
        checkpoint[KEY] = _resume_state(trainer)
        checkpoint |= trainer.strategy.parts.step.exchange.checkpoint_entry()  # type: ignore[attr-defined]

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        torch.set_rng_state(checkpoint[KEY]["rng"])
        trainer.strategy.state.previous = checkpoint[KEY]["previous"] or None  # type: ignore[attr-defined]
        trainer.strategy.parts.shares.load_state(checkpoint[KEY].get("shares", {}))  # type: ignore[attr-defined]
        trainer.strategy.parts.step.exchange.load_checkpoint(checkpoint)  # type: ignore[attr-defined]


def _retry_pauses(seconds: float) -> list[float]:
    """Return the pauses between tries, at most `seconds` in all. Each doubles the pause before, up
    to a minute.

    Example:
        >>> _retry_pauses(10.0)  # 1 + 2 + 4; another 8 would be too many
        [1.0, 2.0, 4.0]
    """
    pauses: list[float] = []
    while sum(pauses) + (pause := min(2.0 ** len(pauses), 60.0)) <= seconds:
        pauses.append(pause)
    return pauses


def _failure_cause(trainer: pl.Trainer, path: Path) -> str | None:
    """Wait for the checkpoint in progress; return why it could not be written, or None if it was
    written."""
    try:
        trainer.strategy.wait_for_checkpoint()  # type: ignore[attr-defined]
    except OSError as error:
        return _failure_message(path, error)
    return None


def _failure_message(path: Path, error: OSError) -> str:
    """Return a sentence about a failed checkpoint: the cause, the free space, and the checkpoints
    that remain."""
    newest = path.with_name("last")
    older = (
        f"the newest whole one is {newest.resolve().name}"
        if newest.exists()
        else "there is no older one"
    )
    cause = f"{error.strerror or error} ({free_space(path.parents[1])})"
    return f"checkpoint {path.name} could not be written to {path.parent}: {cause}; {older}"


def _resume_state(trainer: pl.Trainer) -> dict[str, object]:
    strategy: Any = trainer.strategy
    return {
        "rng": torch.get_rng_state(),
        "version": strategy.state.version,
        "previous": strategy.state.previous or {},
        "shares": strategy.parts.shares.checkpoint_state(strategy.state.version),
    }


def _dump_checkpoint(trainer: pl.Trainer) -> dict[str, object]:
    """Return the checkpoint of this moment. This is a collective of the trainers if weights are
    sharded."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
