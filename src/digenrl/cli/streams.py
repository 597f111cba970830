"""Standard streams of a command: open, and without what a terminal would obey.

Prompts, names of images and keys of a run directory come from anywhere, and messages repeat them. A
control sequence in one could change the title of a terminal, hide lines or fill a clipboard. So
whatever a command prints has its control characters spelled out. On a terminal, colours and a
progress bar's carriage return stay.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

_CODE = r"(?:0|[1-4]|2[2-4]|3[0-79]|9[0-7])"
_COLOUR = rf"\x1b\[(?:{_CODE}(?:;{_CODE}){{0,5}})?m|\r"
"""Sequences that colour or stress the text after them. No such sequence hides text."""
_CONTROL = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
_ON_A_TERMINAL = re.compile(f"(?P<kept>{_COLOUR})|{_CONTROL}")
_ELSEWHERE = re.compile(f"(?P<kept>\\r\\n)|{_CONTROL}")
_GUARDED = "_digenrl_guarded"


def without_controls(text: str, terminal: bool = False) -> str:
    """Return `text` with its control characters spelled out.

    >>> without_controls("a\\x1b]0;title\\x07b")
    'a\\\\x1b]0;title\\\\x07b'
    """
    pattern = _ON_A_TERMINAL if terminal else _ELSEWHERE
    return pattern.sub(
        lambda found: found[0] if found["kept"] else ascii(found[0])[1:-1], str(text)
    )


def guard_streams() -> None:
    """Open standard streams that are closed, and have the others print no control characters.

    A file that is opened later must not get the number of a closed stream: what a library prints
    would end in it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115  # for as long as the process lasts
    for name in ("stdout", "stderr"):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, stream)
        if not getattr(stream, _GUARDED, False):
            _guard_stream(stream)


def _guard_stream(stream: TextIO) -> None:
    terminal = False
    with suppress(OSError, ValueError, AttributeError):
        terminal = stream.isatty()
    write: Callable[[str], int] = stream.write

    def write_guarded(text: str) -> int:
        write(without_controls(text, terminal))
        return len(text)

    any_stream: Any = stream
    with suppress(AttributeError):  # a stream that takes no attributes
        any_stream.write = write_guarded
        setattr(any_stream, _GUARDED, True)
