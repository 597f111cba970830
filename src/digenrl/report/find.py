"""Open the files of a run that may be read."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import BinaryIO

from digenrl.record.small_file import open_small


def open_own(path: Path) -> BinaryIO:
    """Open a file of a run directory for reading. A run directory may come from anywhere, so no
    link is followed, no pipe is waited for and no device is read.

    Raises:
        OSError: there is no such file, or it is not a regular file.
    """
    if path.is_symlink():
        raise OSError(errno.ELOOP, "is a link, which is not followed", str(path))
    return open_small(path)


def files_of(run: Path, folder: str, pattern: str) -> list[Path]:
    """Return the files of a folder in a run directory by name; none if the folder is a link."""
    return [] if (run / folder).is_symlink() else sorted((run / folder).glob(pattern))
