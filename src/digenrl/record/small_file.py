"""Files of a run directory that are read whole: regular, no link, and of a bounded size.

A run directory may come from anywhere. A pipe would be waited for without end, and an archive of a
few bytes can unpack to a file that fills the memory.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import BinaryIO

LONGEST = 4 << 20
"""Most bytes of a file. The longest config.yaml of the shipped experiments has 20 KiB."""


def open_small(path: Path) -> BinaryIO:
    """Open a file for `read_whole`. Nothing is waited for.

    Raises:
        OSError: there is no such file, or it is a link or no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(descriptor, "rb")


def read_whole(file: BinaryIO, most: int = LONGEST) -> bytes:
    """Return the content of an open file.

    Raises:
        ValueError: it has more than `most` bytes.
    """
    content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"has more than {most} bytes")
    return content


def read_text(path: Path, most: int = LONGEST) -> str:
    """Return the text of a file.

    Raises:
        OSError: as `open_small`.
        ValueError: it has more than `most` bytes, or is no UTF-8.
    """
    with open_small(path) as file:
        return read_whole(file, most).decode("utf-8")


def json_object(text: str | bytes) -> dict[str, object]:
    """Return the object of a JSON text.

    Raises:
        ValueError: it is no JSON, no object, or nested too deeply.
    """
    try:
        value: object = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value
