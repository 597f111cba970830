"""Which run a notebook or a command means when nobody says: the newest one."""

from __future__ import annotations

import os
from pathlib import Path

from digenrl.record.run_dir import METRICS


def newest(pattern: str, variable: str, remedy: str) -> Path:
    """The path in environment variable `variable`, else the newest match of `pattern` below outputs/ of the nearest
    directory upwards that holds configs/ (notebooks run in a folder below it).

    Raises:
        FileNotFoundError: there is none; the message ends with `remedy`.
    """
    chosen = os.environ.get(variable)
    here = Path.cwd().resolve()
    root = next((path for path in (here, *here.parents) if (path / "configs").is_dir()), here) / "outputs"
    found = [Path(chosen)] if chosen else sorted(root.glob(pattern), key=lambda path: path.stat().st_mtime)
    if not found or not found[-1].exists():
        raise FileNotFoundError(
            f"{variable}={chosen or '(not set)'}: nothing there, and no {pattern} in {root}. {remedy}"
        )
    return found[-1]


def newest_run() -> Path:
    """The run directory in RUN, else the one whose metrics changed last.

    Raises:
        FileNotFoundError: there is no run yet.
    """
    remedy = "Make one with `make train`, or set RUN to a run directory."
    path = newest(f"**/{METRICS}", "RUN", remedy)
    return path if path.is_dir() else path.parent
