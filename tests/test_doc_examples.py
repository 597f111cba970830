"""Every example of a docstring shows what happens."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
SHOWING = sorted(file for file in SRC.rglob("*.py") if ">>> " in file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", SHOWING, ids=lambda file: file.relative_to(SRC).as_posix())
def test_the_examples_of_a_page_are_true(file: Path) -> None:
    name = ".".join(file.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried > 0
    assert failed == 0
