"""What all of pytest's workers use and one of them makes."""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Made = TypeVar("Made")


def made_once(folder: Path, name: str, make: Callable[[], Made]) -> Made:
    """Return what `make` returns. The first worker that asks calls it, the others wait and read.

    Args:
        folder: what the fixture `shared_folder` returns.
        name: of the file that holds it, as a pickle.
    """
    with (folder / f"{name}.pickle").open("a+b") as kept:
        fcntl.flock(kept, fcntl.LOCK_EX)
        if not kept.seek(0, os.SEEK_END):
            pickle.dump(make(), kept)
        kept.seek(0)
        found: Made = pickle.load(kept)  # noqa: S301  (written above)
    return found
