"""Find a run for notebooks and commands that name none, and the files of a run that may be read."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

from digenrl.images import open_regular
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


def open_own(path: Path) -> BinaryIO:
    """Open a file of a run directory for reading. A run directory may come from anywhere, so no
    link is followed, no pipe is waited for and no device is read.

    Raises:
        OSError: there is no such file, or it is not a regular file.
    """
    if path.is_symlink():
        raise OSError(errno.ELOOP, "is a link, which is not followed", str(path))
    return open_regular(path)


def files_of(run: Path, folder: str, pattern: str) -> list[Path]:
    """Return the files of a folder in a run directory by name; none if the folder is a link."""
    return [] if (run / folder).is_symlink() else sorted((run / folder).glob(pattern))
