"""Conditionings of texts on disk: one safetensors file per wording, mapped into memory by every
process that reads it.

A file appears by one rename, when it is whole and on the disk. Its header names the wording and the
store, and carries a digest of the tensors. An exchanged, foreign or damaged file is removed, and
its wording is encoded again. A writer holds the directory's lock. So one process encodes the
wordings that many miss, and the others find them. The lock ends with its owner. A killed owner
leaves a temporary file, which the next owner removes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from digenrl.models.wording import Condition, Wording

logger = logging.getLogger(__name__)
_LOCK, _UNFINISHED = ".lock", ".tmp"
_HOLDS, _DIGEST = "holds", "xxh3"
"""Keys of a file's metadata: what it holds, and the digest of its tensors."""
_POLL_S = 0.2


def digest_of(facts: object) -> str:
    """Return a digest of a JSON value, to use as a name."""
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


class PromptStore:
    """The conditionings that one encoder makes.

    Args:
        root: directory of all stores; need not exist.
        facts: everything besides the wording that decides about a conditioning. Other facts mean
            another store.
    """

    def __init__(self, root: Path, facts: Mapping[str, object]) -> None:
        self.directory = root / digest_of(facts)

    def read_condition(self, wording: Wording) -> Condition | None:
        """Return views of the wording's file, on the CPU; None if there is no usable file.

        A file that is not what its metadata says is removed with a warning.
        """
        path = self.path_of(wording)
        try:
            with safe_open(path, framework="pt") as file:
                facts = file.metadata() or {}
                found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # no mapping
        except (OSError, SafetensorError):
            return None
        if facts.get(_HOLDS) == self._wording_digest(wording) and facts.get(
            _DIGEST
        ) == _tensors_digest(found):
            return found
        logger.warning("%s is damaged or of another wording: it is encoded again", path)
        # Another process may have removed the file first.
        path.unlink(missing_ok=True)
        return None

    def add_wordings(
        self,
        wordings: Iterable[Wording],
        encode: Callable[[Sequence[Wording]], Iterator[Condition]],
        progress: Callable[[], None] = lambda: None,
    ) -> int:
        """Put every wording into the store, and return how many this process has encoded.

        Args:
            wordings: all wordings that may be asked for.
            encode: called once with the missing wordings, unless none is missing.
            progress: called when an entry has appeared, made by this process or by the one that it
                waits for.

        Raises:
            OSError: an entry cannot be written. No part of that entry is left, and earlier entries
                stay.
        """
        wanted = list(dict.fromkeys(wordings))
        if not self._missing_wordings(wanted):
            return 0
        self.directory.mkdir(parents=True, exist_ok=True)
        with self._lock_store(progress):
            # Left by an owner that was killed: nobody else writes under this lock.
            for unfinished in self.directory.glob(f"*{_UNFINISHED}"):
                unfinished.unlink(missing_ok=True)
            # Again, because whoever held the lock may have encoded some.
            missing = self._missing_wordings(wanted)
            # One entry after the other, so that an interrupted run keeps what it has.
            for wording, condition in zip(missing, encode(missing) if missing else (), strict=True):
                self._write_entry(wording, condition)
                progress()
        return len(missing)

    def _missing_wordings(self, wordings: Sequence[Wording]) -> list[Wording]:
        return [wording for wording in wordings if not self._has_entry(wording)]

    def _has_entry(self, wording: Wording) -> bool:
        """Return whether the wording's file is whole by its head. Tensors are checked by
        `read_condition`: those of a full store are too many to read at the start of a run."""
        try:
            with safe_open(self.path_of(wording), framework="pt") as file:
                return (file.metadata() or {}).get(_HOLDS) == self._wording_digest(wording)
        except (OSError, SafetensorError):
            return False

    def _wording_digest(self, wording: Wording) -> str:
        return digest_of([self.directory.name, wording.key])

    def path_of(self, wording: Wording) -> Path:
        """Return the path of the wording's file, which need not exist."""
        return self.directory / f"{digest_of(wording.key)}.safetensors"

    def _write_entry(self, wording: Wording, condition: Condition) -> None:
        path = self.path_of(wording)
        tensors = {key: value.detach().cpu().contiguous() for key, value in condition.items()}
        facts = {_HOLDS: self._wording_digest(wording), _DIGEST: _tensors_digest(tensors)}
        unfinished = path.with_suffix(f".{uuid.uuid4().hex}{_UNFINISHED}")
        try:
            with unfinished.open("wb") as file:
                file.write(save(tensors, facts))
                file.flush()
                # On the disk before the name appears, so that a crash leaves no torn file.
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    @contextmanager
    def _lock_store(self, progress: Callable[[], None]) -> Iterator[None]:
        with (self.directory / _LOCK).open("w") as file:
            seen = -1
            # Tried again and again, so that the entries of the owner count as progress.
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    entries = len(os.listdir(self.directory))
                    if entries != seen:
                        progress()
                    seen = entries
                    time.sleep(_POLL_S)
            yield


def _tensors_digest(condition: Condition) -> str:
    """Return a digest of the tensors: names, types, shapes and bytes."""
    total = xxhash.xxh3_128()
    for key, value in sorted(condition.items()):
        total.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode())
        # As bytes, because numpy has no bfloat16.
        total.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def files_digest(files: Sequence[Path], notes: Path) -> str:
    """Return a digest of the files' names and bytes (xxh3).

    The digest is kept in the directory `notes`. It is not computed again while path, size and time
    of change of every file are the same.

    Raises:
        OSError: a file cannot be read.
    """
    stats = [(str(file.resolve()), file.stat()) for file in files]
    note = notes / digest_of([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    try:
        return note.read_text()
    except OSError:
        pass
    contents = []
    for path in files:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
        contents.append((path.parent.name, path.name, digest))
    total = digest_of(contents)
    unfinished = note.with_suffix(f".{uuid.uuid4().hex}{_UNFINISHED}")
    try:
        notes.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(total)
        os.replace(unfinished, note)
    except OSError:  # it is only taken again
        unfinished.unlink(missing_ok=True)
    return total
