"""Processes of a scheduler, for all tests of launchers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launchers.scheduled import Processes


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Yield what starts the processes of a job, and kill whatever is left of them."""
    found = Processes(tmp_path)
    yield found
    found.kill()
