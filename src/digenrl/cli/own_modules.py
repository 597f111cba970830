"""Whether modules of the working directory can be imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_NONE = ("", "[]", "null", "None")


def find_own_modules(words: Sequence[str]) -> None:
    """Let modules of the working directory be imported if the command line has `allow_targets`.

    The directory comes last, so that no file there stands in for an installed module.
    """
    values = [
        word.partition("=")[2] for word in words if word.lstrip("+").startswith("allow_targets=")
    ]
    if values and values[-1].strip() not in _NONE:
        sys.path.append(os.getcwd())
