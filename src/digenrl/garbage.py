"""Python's garbage collector, where it would search much and find nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage() -> Iterator[None]:
    """Disable garbage collection during imports and planning, where it finds nothing and takes 15
    to 20 % of the time. Objects made in the body count as old afterwards, so that they are not
    searched at once."""
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
