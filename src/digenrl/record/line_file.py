"""Bounded file of lines that a single process writes. It never makes a run fail."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

from digenrl.record.run_dir import replaced, unwritten, write_whole

_STEP = re.compile(rb'"step":(-?\d+)')
_VERSION = re.compile(rb'"version":(\d+)')
_END = re.compile(rb'"end":([0-9.e+-]+)')
LEFT_OUT = "left_out"
"""Key of the line that replaces dropped spans: {"stage cause": seconds}."""


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
            self._open()
            assert self._descriptor is not None
            write_whole(self._descriptor, block)
        except OSError as error:
            if self._descriptor is not None:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self.size)
            unwritten(self.path, block.count(b"\n"), error)
            return False
        self.size += len(block)
        return True

    def _open(self) -> None:
        if self._descriptor is not None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        self._descriptor = os.open(self.path, flags, 0o644)
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


def kept_steps(sizes: Mapping[int, int], limit: float) -> set[int]:
    """Return the steps that stay when a file is thinned: the first ones, in an eighth of `limit`,
    and the newest, in three eighths.

    Args:
        sizes: step -> bytes.
        limit: bytes of the whole file.
    """
    first = _while_fits(sorted(sizes), sizes, limit / 8)
    return first | _while_fits(sorted(sizes.keys() - first, reverse=True), sizes, 3 * limit / 8)


def _while_fits(steps: list[int], sizes: Mapping[int, int], room: float) -> set[int]:
    ends = accumulate(sizes[step] for step in steps)
    return {step for step, end in zip(steps, ends, strict=True) if end <= room}


def thin(path: Path, limit: float) -> None:
    """Drop whole steps of a span file (see `kept_steps`), and keep the sums of their seconds in its
    first line.

    The file is read and written line by line, at about 100 MB/s.

    Raises:
        OSError: the thinned file cannot be written. The old file stays as it was.
    """
    sizes: Counter[int] = Counter()
    for step, _, line in _lines(path):
        sizes[step] += len(line)
    kept = kept_steps(sizes, limit)
    left_out: Counter[str] = Counter()
    who: dict[str, Any] = {}
    for step, opens, line in _lines(path):
        if step in kept or opens:
            continue
        row = json.loads(line)
        who = {"rank": row["rank"], "role": row["role"]}
        label = f"{row['stage']} {row['cause']}" if "cause" in row else row["stage"]
        left_out[label] += row["end"] - row["start"]
    with path.open("rb") as file:
        first = file.readline()
    if first.startswith(b'{"left_out":'):
        left_out.update(json.loads(first)[LEFT_OUT])
    with replaced(path) as temporary, temporary.open("wb") as file:
        total = {name: round(seconds, 3) for name, seconds in left_out.items()}
        file.write(json.dumps({LEFT_OUT: total, **who}, separators=(",", ":")).encode() + b"\n")
        for step, opens, line in _lines(path):
            if step in kept or opens:
                file.write(line)


def _lines(path: Path) -> Iterator[tuple[int, bool, bytes]]:
    """Yield (step, whether an attempt begins here, line) of each span.

    A span without step or version belongs to the step of the span before.
    """
    step, previous = -1, -1.0
    with path.open("rb") as file:
        for line in file:
            end = _END.search(line)
            if end is None or not line.endswith(b"}\n"):  # the sum of what was dropped, or torn
                continue
            found = _STEP.search(line) or _VERSION.search(line)
            step = int(found[1]) if found is not None else step
            yield step, float(end[1]) < previous - 1.0, line
            previous = float(end[1])
