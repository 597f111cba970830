"""Notebooks with stored outputs: the outputs are those of the stored sources, of no machine in
particular, and come again."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from scripts import notebooks

STORED = pytest.mark.parametrize("path", notebooks.STORED, ids=lambda path: path.stem)


@STORED
def test_outputs_belong_to_the_sources_and_name_no_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata["digenrl"]["sources"] == notebooks.digest(notebook), "run `make notebooks`"
    assert any(text.strip() for text in notebooks.printed(notebook))
    assert not notebooks.machine_paths(notebook)
    notebook.cells[0].source += " "
    assert notebook.metadata["digenrl"]["sources"] != notebooks.digest(notebook)


@pytest.mark.slow
@pytest.mark.processes
@STORED
def test_they_print_the_same_again(path: Path) -> None:
    stored = nbformat.read(path, as_version=4)
    assert notebooks.printed(notebooks.executed(path)) == notebooks.printed(stored), (
        "run `make "
        "notebooks`"
    )
