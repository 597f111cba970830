"""Make one file of a report, so that a failure costs that file alone."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path


def make_or_warn(name: str, make: Callable[[], None], warnings: list[str]) -> None:
    """Make a file of a report. An error becomes a warning."""
    try:
        make()
    except OSError as error:
        warnings.append(f"{name} could not be made: {error.strerror or error}")
    # the files of a run may hold anything, and a defect must cost one file; it is reported
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        warnings.append(f"{name} could not be made: {type(error).__name__}: {error} ({where})")
