"""Weights & Biases that works without a key or a server. (TensorBoard and CSV loggers are
Lightning's.)"""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import lightning.pytorch.loggers as pl_loggers
import wandb
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_warn

_TROUBLE = (wandb.errors.Error, OSError, TimeoutError)
"""Exceptions of W&B when its server or its helper process cannot be reached."""


def has_key() -> bool:
    """Return whether W&B would find a login: WANDB_API_KEY, or an entry of its host in the netrc
    file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = (
        urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
        or "api.wandb.ai"
    )
    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    try:
        return path.exists() and host in netrc.netrc(path).hosts
    except (netrc.NetrcParseError, OSError):
        return False


class WandbLogger(pl_loggers.WandbLogger):
    """Lightning's W&B logger, offline unless there is a key.

    Offline runs are in `<save_dir>/wandb`; `wandb sync <directory>` uploads them later. If the
    server cannot be reached at the start, the run is recorded offline.

    Args:
        save_dir: the run directory.
        project: W&B project.
        name: name of the run; None = the run directory's name.
        offline: whether to record offline; None = online exactly if there is a key (and WANDB_MODE
            does not forbid it).
        timeout_s: seconds to wait for the server at the start and for the last upload at the end.
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
            settings=wandb.Settings(
                init_timeout=timeout_s, finish_timeout=timeout_s, console="off"
            ),
        )

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """W&B run, made on first use; recorded offline if the server does not answer."""
        try:
            return super().experiment
        except _TROUBLE as error:
            if self._offline:
                raise
            rank_zero_warn(
                f"W&B cannot be reached ({error}); the run is recorded offline in "
                f"{self.save_dir}/wandb"
            )
            self._offline = True
            self._wandb_init["mode"] = (
                "offline"  # the environment variable that Lightning sets was read already
            )
            return super().experiment
