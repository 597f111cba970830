"""Find a run, a plan or a sweep for a notebook that names none."""

from __future__ import annotations

import os
from pathlib import Path

from digenrl.record.run_dir import METRICS


def newest(pattern: str, variable: str, remedy: str) -> Path:
    """Return the path in environment variable `variable`, or else the newest match of `pattern`
    below outputs/.

    outputs/ is in the nearest directory upwards that holds configs/, because notebooks run in a
    folder below it.

    Raises:
        FileNotFoundError: there is no match. The message ends with `remedy`.
    """
    chosen = os.environ.get(variable)
    here = Path.cwd().resolve()
    root = (
        next((path for path in (here, *here.parents) if (path / "configs").is_dir()), here)
        / "outputs"
    )
    found = (
        [Path(chosen)]
        if chosen
        else sorted(root.glob(pattern), key=lambda path: path.stat().st_mtime)
    )
    if not found or not found[-1].exists():
        raise FileNotFoundError(
            f"{variable}={chosen or '(not set)'}: nothing there, and no {pattern} in {root}. "
            f"{remedy}"
        )
    return found[-1]


def newest_run() -> Path:
    """Return the run directory in RUN, or else the run whose metrics changed last.

    Raises:
        FileNotFoundError: there is no run yet.
    """
    remedy = "Make one with `make train`, or set RUN to a run directory."
    path = newest(f"**/{METRICS}", "RUN", remedy)
    return path if path.is_dir() else path.parent
