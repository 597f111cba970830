"""The tests of `inside/` are collected where the process has the strict device; the others skip
where it cannot be built."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.device import build
from tests.device.environment import MARK

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """`inside/` belongs to processes that have the device."""
    return True if collection_path == HERE / "inside" and MARK not in os.environ else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, where no compiler is there."""
    reason = build.missing()
    for item in items:
        if reason is not None and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
