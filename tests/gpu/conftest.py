"""Every test of this folder needs a GPU; without one it is skipped with the reason."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from digenrl import accelerator

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark and, where torch sees no GPU, skip."""
    absent = pytest.mark.skip(reason=f"torch {torch.__version__} sees no GPU")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not accelerator.device_count():
                item.add_marker(absent)


@pytest.fixture(autouse=True)
def empty_gpu() -> None:
    """A test begins with nothing of the test before it on the GPU."""
    from benchmarks import _device

    _device.release(_device.find())
    gc.freeze()  # the next collection need not look through all that has been imported
