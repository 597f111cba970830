"""Weights & Biases that works without a key or a server. (TensorBoard and CSV loggers are
Lightning's.)"""

from __future__ import annotations

import netrc
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import lightning.pytorch.loggers as pl_loggers
import wandb
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_warn

from digenrl.record.run_dir import atomic_replace
from digenrl.record.small_file import read_text

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


def kept_id(folder: Path) -> str:
    """Return the id of the run that writes into `folder`; a new one where there is none yet."""
    file = folder / "id"
    with suppress(OSError, ValueError):
        if found := read_text(file, 128).strip():
            return found
    new = secrets.token_hex(4)
    with suppress(OSError):  # then a resumed run has another record
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_replace(file) as unfinished:
            unfinished.write_text(f"{new}\n", encoding="ascii")
    return new


class WandbLogger(pl_loggers.WandbLogger):
    """Lightning's W&B logger, offline unless there is a key.

    Offline runs are in `<save_dir>/wandb`; `wandb sync <directory>` uploads them later. If the
    server cannot be reached at the start, the run is recorded offline.

    Args:
        save_dir: the run directory.
        project: W&B project.
        name: name of the run; None = `experiment` and the run directory's name.
        experiment: name of the experiment.
        id: W&B's id of the run; None = a new one, which is kept in `<save_dir>/wandb/id`, so that a
            resumed run goes on in the same record.
        entity: user or team; None = the login's.
        group: group of runs; None = none.
        tags: tags.
        notes: a longer description.
        offline: whether to record offline; None = online exactly if there is a key (and WANDB_MODE
            does not forbid it).
        timeout_s: seconds to wait for the server at the start and for the last upload at the end.
    """

    def __init__(
        self,
        save_dir: str | Path,
        project: str = "digenrl",
        name: str | None = None,
        experiment: str | None = None,
        id: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        notes: str | None = None,
        offline: bool | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        if offline is None:
            offline = os.environ.get("WANDB_MODE", "online") != "online" or not has_key()
        folder = Path(save_dir)
        super().__init__(
            name=name or " ".join([*([experiment] if experiment else []), folder.name]),
            save_dir=str(save_dir),
            id=id or kept_id(folder / "wandb"),
            project=project,
            offline=offline,
            entity=entity,
            group=group,
            tags=list(tags),
            notes=notes,
            settings=wandb.Settings(
                init_timeout=timeout_s, finish_timeout=timeout_s, console="off"
            ),
        )
        self._has_axis = False

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log at an RL step, which is also a metric of its own, the x axis of all others."""
        if not self._has_axis:
            self._has_axis = True
            self.experiment.define_metric("rl_step")
            self.experiment.define_metric("*", step_metric="rl_step", step_sync=True)
        super().log_metrics(dict(metrics) | ({} if step is None else {"rl_step": step}), step)

    def finalize(self, status: str) -> None:
        """Write what waits, and end the W&B run. Ranks leave without Python's exit handlers, by
        which W&B would do so itself: an offline record would be empty."""
        super().finalize(status)
        if self._experiment is not None:
            self._experiment.finish(exit_code=int(status != "success"))

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
            # W&B's helper process still holds the id of the run that it could not begin.
            wandb.teardown()
            self._offline = True
            self._wandb_init["mode"] = (
                "offline"  # the environment variable that Lightning sets was read already
            )
            return super().experiment
