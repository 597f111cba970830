"""How a run is reached: a file in its directory, which only its user can read, for as long as the run lasts."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

ACCESS = "access.json"


@dataclass(frozen=True)
class Access:
    """Where a run's store listens, and what proves that one may speak there."""

    host: str
    port: int
    token: str = field(repr=False)
    epoch: float
    """Wall-clock second that spans call zero."""
    prefix: str = ""
    """The scheduler's job, where one started the ranks."""


def leave_access(run_dir: Path, access: Access) -> None:
    """Write it down, for this user alone."""
    (run_dir / ACCESS).unlink(missing_ok=True)
    handle = os.open(run_dir / ACCESS, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        json.dump(asdict(access), file)


def take_access(run_dir: Path) -> Access:
    """What the run's host wrote down.

    Raises:
        OSError: there is no such file.
        ValueError: the file is another user's, or others can read it, or it holds something else.
    """
    with (
        open(os.open(run_dir / ACCESS, os.O_RDONLY | os.O_NOFOLLOW)) as file,
        tempfile.TemporaryFile(dir=run_dir) as own,
    ):
        found, mine = os.fstat(file.fileno()), os.fstat(own.fileno())
        if found.st_uid != mine.st_uid or found.st_mode & 0o077:
            raise ValueError(
                f"{run_dir / ACCESS} belongs to user {found.st_uid} with mode {found.st_mode & 0o777:o}, wanted are "
                f"user {mine.st_uid} and 600: start all processes as one user. If you did, somebody else wrote it."
            )
        try:
            return Access(**json.load(file))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{run_dir / ACCESS} does not say how to reach a run: {error}.") from error
