"""Run a scorer once for all ranks of a machine, on GPUs that no rank has.

The rank that asks first starts the child of `process.py` and watches it. The others find the
child's address in a file. The child holds a lock on that file as long as it lives, so that whoever
asks after its death takes the lock and starts the next one. The child ends with the rank that
started it. Ranks of one machine have one parent (launcher, torchrun's agent, SLURM's step), which
names their folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from digenrl import accelerator
from digenrl.rewards.needs import gpus_of
from digenrl.rewards.process import ProcessScorer
from digenrl.rewards.protocol import RewardError
from digenrl.rewards.remote import RemoteScorer

_POLL_S = 0.1
_ENDING_S = 5.0
"""Seconds that children get to end with their ranks."""
_SCRATCH = "tmp"
"""Folder of the children's temporary files, which goes with them however they end."""


class ManagedScorer(ProcessScorer):
    """Scorer in a process that the ranks of this machine share.

    Args:
        node: YAML node of the scorer. With a `url` it is a judge behind an OpenAI-compatible
            endpoint, and the child serves that endpoint too (`judge.py`).
        others: as of `ProcessScorer`.
    """

    def _ensure_client(self) -> RemoteScorer:
        """Return a client of the machine's child, which is started if there is none."""
        if self._client is not None and (self._child is None or self._child.poll() is None):
            return self._client
        self._end_child()
        deadline = time.monotonic() + self._start_s
        written = json.dumps(self._node, sort_keys=True).encode()
        name = hashlib.blake2b(written, digest_size=8).hexdigest()
        while True:
            self._check_open()
            folder = _lock_folder()
            file = folder / name
            if (lock := _try_lock(file)) is not None:
                return self._start_child(folder, lock)
            with suppress(ValueError, FileNotFoundError):  # its owner has not written it yet
                told = json.loads(file.read_bytes())
                return self._connect_client(told["url"], told["token"])
            if time.monotonic() > deadline:
                self._raise_lost(TimeoutError(), self._start_s)
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End the child, and remove the folder if no other child uses it."""
        super().close()
        remove_unused_folder(_folder_of(os.getppid()))

    def _start_child(self, folder: Path, lock: int) -> RemoteScorer:
        """Start the child that holds `lock`, and tell the other ranks of it."""
        held = [lock]
        try:
            os.ftruncate(lock, 0)
            numbers = self._take_free_gpus(folder, held)
            node = self._node
            if "url" in node:
                node = {
                    "_target_": "digenrl.rewards.judge.ServedJudge",
                    "_recursive_": False,
                    "scorer": node,
                    "gpus": numbers,
                    "start_s": self._start_s,
                }
            scratch = folder / _SCRATCH
            scratch.mkdir(exist_ok=True)
            url, token = self._spawn_child(
                node, numbers[0] if numbers else None, held, {"TMPDIR": str(scratch)}
            )
            os.pwrite(lock, json.dumps({"url": url, "token": token}).encode(), 0)
        finally:
            for descriptor in held:  # the child has its own
                os.close(descriptor)
        return self._connect_client(url, token)

    def _take_free_gpus(self, folder: Path, held: list[int]) -> list[int]:
        """Return the numbers of the GPUs that the child takes: the last ones that nobody has."""
        wanted = gpus_of(self._node) if accelerator.device_count() else 0
        numbers: list[int] = []
        for number in reversed(range(accelerator.device_count())):
            if len(numbers) == wanted or number == accelerator.current_device().index:
                break
            if (lock := _try_lock(folder / f"gpu-{number}")) is not None:
                held.append(lock)
                numbers.insert(0, number)
        if len(numbers) < wanted:
            raise RewardError(
                f"{self._node.get('_target_')} is placed managed and takes {wanted} GPUs, but "
                f"this process sees {len(numbers)} that nobody has: set "
                "hardware.pools.NAME.judges, and let every process see all GPUs of its machine."
            )
        return numbers


def _lock_folder() -> Path:
    """Return the folder of the locks that the ranks of this machine share, for this user alone."""
    folder = _folder_of(os.getppid())
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
        raise RewardError(f"{folder} belongs to another user: remove it, or set TMPDIR.")
    return folder


def _folder_of(parent: int) -> Path:
    return Path(tempfile.gettempdir()) / f"digenrl-judges-{os.getuid()}-{parent}"


def remove_unused_folder(folder: Path, wait_s: float = 0.0) -> None:
    """Remove the folder of a machine's children, with the temporary files that they have left, once
    no child lives.

    Args:
        wait_s: seconds to wait for children that are about to end.
    """
    deadline = time.monotonic() + wait_s
    if not folder.is_dir() or folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return
    while True:
        held = list[int]()
        try:
            locks = [file for file in folder.iterdir() if file.name != _SCRATCH]
            for file in locks:
                if (lock := _try_lock(file)) is None:
                    break
                held.append(lock)
            else:
                shutil.rmtree(folder, ignore_errors=True)
                return
        except FileNotFoundError:
            return  # another rank removes it
        finally:
            for lock in held:
                os.close(lock)
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL_S)


def remove_shared_folder(parent: int) -> None:
    """Remove the folder that ranks with this parent have shared, once they are gone."""
    remove_unused_folder(_folder_of(parent), _ENDING_S)


def _try_lock(file: Path) -> int | None:
    """Return a descriptor of `file` with its lock; None while another process holds the lock."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:  # the folder is being removed
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.stat(file), os.fstat(descriptor)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None
