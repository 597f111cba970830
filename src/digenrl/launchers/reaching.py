"""Find the run that a process belongs to: its access file, and the address on the route there."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import Any

from digenrl.cluster.access import ACCESS, Access
from digenrl.record.small_file import json_object, open_small, read_whole


def read_access(run_dir: Path) -> Access:
    """Read the access file of a run.

    Raises:
        OSError: there is no such file.
        ValueError: the file belongs to another user, other users can read it, or its content is not
            an `Access`.
    """
    with (
        open_small(run_dir / ACCESS) as file,
        tempfile.TemporaryFile(dir=run_dir) as own,
    ):
        # A file made here shows which user id this file system gives to this user: it may map ids
        # (NFS, containers).
        found, mine = os.fstat(file.fileno()), os.fstat(own.fileno())
        if found.st_uid != mine.st_uid or found.st_mode & 0o077:
            raise ValueError(
                f"{run_dir / ACCESS} belongs to user {found.st_uid} with mode "
                f"{found.st_mode & 0o777:o}, wanted are "
                f"user {mine.st_uid} and 600: start all processes as one user. If you did, "
                "somebody else wrote it."
            )
        try:
            facts: Any = json_object(read_whole(file))
            return Access(**facts)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{run_dir / ACCESS} does not say how to reach a run: {error}."
            ) from error


def source_address(address: str) -> str:
    """Return this machine's address on the route to `address`. Nothing is sent."""
    family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a UDP socket only looks up the route.
        probe.connect(target)
        return str(probe.getsockname()[0])
