"""Evaluation on rollouts gives what evaluation on trainers gives, while trainers draw nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.utilities.types import STEP_OUTPUT  # noqa: F401

from tests.strategy.processes import TINY
from tests.training import Train, commands, fault

pytestmark = [pytest.mark.processes]

WATCHED = [word for word in TINY if word != "~callbacks.evaluation"]
EVALUATION = (
    "callbacks.evaluation.samples_per_prompt=3",
    "callbacks.evaluation.max_prompts=5",
    "callbacks.evaluation.every=1",
    "reward=digits",
)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Any]:
    """Starts train commands, and leaves none behind."""
    yield from commands(tmp_path)
