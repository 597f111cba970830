"""Python's garbage collector, where it would search much and find nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage() -> Iterator[None]:
    """Switch the collector off for what leaves no reference cycles: imports, of whose time it takes
    a fifth, and plans (a sixth). What is left behind counts as old, so that it is not searched at
    once."""
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if not frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()
