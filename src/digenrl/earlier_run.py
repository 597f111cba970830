"""The model of an earlier run, for use again: its configuration with changes, and its weights."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from digenrl import config as configuration
from digenrl.config.stored import compare_ties

if TYPE_CHECKING:
    from digenrl.algorithms.base import PolicyModule


class NoCheckpoint(RuntimeError):
    """The run has no whole checkpoint to evaluate."""


def changed_run(run: Path, words: Sequence[str]) -> configuration.Composed:
    """Return the configuration of the run in directory `run`, changed by `words`. Copies of a
    changed key follow.

    Raises:
        ConfigError: there is no such run, or its configuration does not allow a change.
    """
    return configuration.load(words, stored=run)


def require_tied(run_dir: Path, checkpoint: Path, words: Sequence[str]) -> None:
    """Check that a run's config.yaml is what its checkpoint was written with, except for what
    `words`, the command line, set.

    Raises:
        ConfigError: the message names every key that differs.
    """
    from digenrl.strategy.checkpoint_io import ties_of

    problems, notes = compare_ties(run_dir, ties_of(checkpoint), words)
    if problems:
        raise configuration.ConfigError(problems)
    for note in notes:
        print(note, file=sys.stderr)


def last_checkpoint(
    run_dir: Path, words: Sequence[str] | None = None
) -> tuple[dict[str, Any], int]:
    """Return the newest checkpoint that verifies, and its RL step.

    Args:
        words: the command line, for `require_tied`; None: nothing is compared.

    Raises:
        NoCheckpoint: there is none.
        ConfigError: see `require_tied`.
    """
    from digenrl.strategy.checkpoint_io import (
        CheckpointError,
        DirectoryCheckpointIO,
        newest_valid,
        step_of,
    )

    try:
        folder = newest_valid(run_dir / "checkpoints", say=partial(print, file=sys.stderr))
        if words is not None:
            require_tied(run_dir, folder, words)
        return DirectoryCheckpointIO().load_checkpoint(folder), step_of(folder)
    except CheckpointError as error:
        raise NoCheckpoint(str(error)) from error


def restore_module(module: PolicyModule, checkpoint: dict[str, Any]) -> None:
    """Give an algorithm's module the weights, averages and counters of a checkpoint.

    Evaluations use the average. A message is printed if the average has not moved yet.
    """
    module.load_state_dict(checkpoint["state_dict"], strict=False)
    module.on_load_checkpoint(checkpoint)
    if module.ema is not None and module.ema.steps < module.ema.every:
        print(
            f"the moving average is still the base model: it follows every {module.ema.every} "
            f"optimizer steps (algorithm.ema.every), and there were {module.ema.steps}",
            file=sys.stderr,
        )
