"""Weights & Biases that cannot stop a run. (TensorBoard and CSV need no help: configs/logger names Lightning's own.)"""

from __future__ import annotations

import netrc
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import lightning.pytorch.loggers as pl_loggers
import wandb
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

_TROUBLE = (wandb.errors.Error, OSError, TimeoutError)
"""What W&B raises when its server or its helper process is away; anything else is a defect and is raised."""


def has_key() -> bool:
    """Whether W&B would find a login: WANDB_API_KEY, or an entry of its host in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or "api.wandb.ai"
    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    try:
        return path.exists() and host in netrc.netrc(path).hosts
    except (netrc.NetrcParseError, OSError):
        return False


class WandbLogger(pl_loggers.WandbLogger):
    """Lightning's W&B logger, offline unless a key is there, and never the cause of a failed run.

    Offline runs lie in `<save_dir>/wandb`; `wandb sync <directory>` uploads them later. If the server cannot be reached
    at the start the run is recorded offline; if logging fails later it ends with one warning. metrics.jsonl is complete
    in every case.

    Args:
        save_dir: the run directory.
        project: W&B project.
        name: of the run; None = the run directory's name.
        offline: None = online exactly if a key is there (and WANDB_MODE does not say otherwise).
        timeout_s: patience for the server at the start and for the last upload at the end.
    """

    def __init__(
        self,
        save_dir: str | Path,
        project: str = "digenrl",
        name: str | None = None,
        offline: bool | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        if offline is None:
            offline = os.environ.get("WANDB_MODE", "online") != "online" or not has_key()
        super().__init__(
            name=name or Path(save_dir).name,
            save_dir=str(save_dir),
            project=project,
            offline=offline,
            settings=wandb.Settings(init_timeout=timeout_s, finish_timeout=timeout_s, console="off"),
        )
        self._given_up = False

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The W&B run, made on first use; recorded offline when the server does not answer."""
        try:
            return super().experiment
        except _TROUBLE as error:
            if self._offline:
                raise
            rank_zero_warn(f"W&B cannot be reached ({error}); the run is recorded offline in {self.save_dir}/wandb")
            self._offline = True
            self._wandb_init["mode"] = "offline"  # the environment variable that Lightning sets was read already
            return super().experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._attempt(lambda: pl_loggers.WandbLogger.log_metrics(self, metrics, step))

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        self._attempt(lambda: pl_loggers.WandbLogger.log_hyperparams(self, params))

    def _attempt(self, log: Any) -> None:
        if self._given_up:
            return
        try:
            log()
        except _TROUBLE as error:
            self._given_up = True
            rank_zero_warn(f"W&B logging ends here: {type(error).__name__}: {error}. metrics.jsonl goes on.")
