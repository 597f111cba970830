"""Bounded file of lines that a single process writes. It never makes a run fail."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from digenrl.record.run_dir import (
    count_unwritten,
    open_below,
    own_folder,
    require_plain,
    write_whole,
)


class LineFile:
    """Writer that appends blocks of lines. A block that cannot be written leaves nothing behind and
    is counted.

    Args:
        path: file, which is created with its directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        """Bytes of whole lines in the file."""
        self._descriptor: int | None = None

    def write(self, block: bytes) -> bool:
        """Append `block` (lines with their newlines), and return whether that succeeded."""
        try:
            self._open_file()
            assert self._descriptor is not None
            write_whole(self._descriptor, block)
        except OSError as error:
            if self._descriptor is not None:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self.size)
            count_unwritten(self.path, block.count(b"\n"), error)
            return False
        self.size += len(block)
        return True

    def _open_file(self) -> None:
        if self._descriptor is not None:
            return
        own_folder(self.path.parent)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = open_below(self.path, flags)
        try:
            require_plain(descriptor, self.path)
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self.size = os.fstat(self._descriptor).st_size
        if (
            self.size and os.pread(self._descriptor, 1, self.size - 1) != b"\n"
        ):  # a crash tore the last line
            write_whole(self._descriptor, b"\n")
            self.size += 1

    def close(self) -> None:
        """Close the file. The next block opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
