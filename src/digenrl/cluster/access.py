"""The access file of a run: address and token of its control store.

The file lies in the run directory while the run lasts. Only the user who started the run can read
it.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

ACCESS = "access.json"


@dataclass(frozen=True)
class Access:
    """Address of a run's control store, and the token that a process must hold to use the store."""

    host: str
    port: int
    token: str = field(repr=False)
    epoch: float
    """Wall-clock second (Unix time) that counts as zero in the run's spans."""
    prefix: str = ""
    """Identifier of the scheduler's job; empty unless torchrun or SLURM started the ranks."""


def open_door(run_dir: Path, host: str, port: int, token: str, epoch: float) -> Path:
    """Write the access file of a run whose ranks were forked; return its path."""
    write_access(run_dir, Access(host, port, token, epoch))
    return run_dir / ACCESS


def write_access(run_dir: Path, access: Access) -> None:
    """Write the access file, readable by this user alone. No reader ever sees half of it."""
    temporary = run_dir / f".{ACCESS}.{secrets.token_hex(8)}.tmp"
    # O_EXCL with mode 600 from the start: the token is never in a file that somebody else made or
    # can read.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(asdict(access), file)
        os.replace(temporary, run_dir / ACCESS)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
