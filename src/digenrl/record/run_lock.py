"""One process at a time goes on with a run: a lock on its directory.

The kernel holds the lock (flock) for the process that took it and for the children that keep the
descriptor, such as the launcher's monitor. The lock ends with the last of these processes, however
they end. A file in the directory only says who holds it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from digenrl.record.run_dir import atomic_replace, printable_text

HOLDER = ".lock"
"""File that says who holds the lock: host, process and Unix second."""
_DYING_S = 30.0
"""Seconds to wait for a holder that has died, while its monitor still writes the run's end."""
_ENDING_S = 0.5
"""Seconds to wait for any other holder, which may be about to end."""
_LOOK_S = 0.05
_held: dict[Path, int] = {}
"""Run directory -> descriptor, in this process."""


class RunIsHeld(ValueError):
    """Another process goes on with this run."""


def hold_run(run_dir: Path) -> None:
    """Take the lock of a run directory, or keep it if this process has it.

    Nothing is written. A file system without locks, where nobody can hold one, refuses nobody.

    Raises:
        RunIsHeld: the message says who has it, and since when.
    """
    run_dir = run_dir.absolute()
    if run_dir in _held:
        return
    began = time.monotonic()
    while (descriptor := _try_lock(run_dir)) is None:
        if time.monotonic() > began + (_DYING_S if _is_dying(run_dir) else _ENDING_S):
            raise RunIsHeld(
                f"{run_dir} is held by {_describe_holder(run_dir)}: two processes on one run would "
                "overwrite its checkpoints and records. Wait for its end, or stop it (SIGTERM), "
                "then resume."
            )
        time.sleep(_LOOK_S)
    if descriptor >= 0:
        _held[run_dir] = descriptor


def say_holder(run_dir: Path) -> None:
    """Write down that this process holds the lock."""
    facts = {"host": socket.gethostname(), "process": os.getpid(), "since": time.time()}
    with suppress(OSError), atomic_replace(run_dir.absolute() / HOLDER) as temporary:
        temporary.write_text(json.dumps(facts))


def release_run(run_dir: Path) -> None:
    """Give the lock back. Without one, nothing happens."""
    descriptor = _held.pop(run_dir.absolute(), None)
    if descriptor is not None:
        with suppress(OSError):
            (run_dir / HOLDER).unlink()
        os.close(descriptor)


def close_inherited() -> None:
    """Close a forked child's copies, so that a child which outlives this process holds nothing."""
    for descriptor in _held.values():
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


def _try_lock(run_dir: Path) -> int | None:
    """Return a descriptor with the lock; None if it is held, -1 where there are no locks."""
    descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        return None if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else -1
    return descriptor


def _read_holder(run_dir: Path) -> tuple[str, int, float] | None:
    try:
        descriptor = os.open(run_dir / HOLDER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            facts = json.loads(file.read(4096))
        return str(facts["host"]), int(facts["process"]), float(facts["since"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _is_dying(run_dir: Path) -> bool:
    """Return whether the holder was a process of this machine that is gone."""
    facts = _read_holder(run_dir)
    if facts is None or facts[0] != socket.gethostname() or facts[1] <= 0:
        return False
    try:
        os.kill(facts[1], 0)
        state = Path(f"/proc/{facts[1]}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return True
    except (OSError, IndexError):
        return False
    return state in ("Z", "X")  # its parent has not asked for its exit code


def _describe_holder(run_dir: Path) -> str:
    """Return who holds the lock, and since when, in words."""
    facts = _read_holder(run_dir)
    if facts is None:
        return "another process, which has just begun"
    host, process, since = facts
    try:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
    except (ValueError, OverflowError, OSError):
        when = "an unknown time"
    return f"process {process} on {printable_text(host)[:80]} since {when}"
