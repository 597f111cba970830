"""The end of a run as a table."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from digenrl.report.read_run import read_run
from digenrl.report.summary import build_summary
from digenrl.report.tables import final_table
from tests.report.synthetic import write_run


@pytest.mark.parametrize("width", [40, 80, 200])
def test_end_table_fits_and_names_status_and_alarms(tmp_path: Path, width: int) -> None:
    summary = build_summary(
        read_run(write_run(tmp_path / "digits_flowgrpo" / "run", steps=8, samples=False))
    )
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(final_table({**summary, "diversity_ratio": 0.4}))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "completed" in text
    assert "mode collapse" in text.replace("\n", " ")
    assert max(len(line) for line in text.splitlines()) <= width


def test_the_launcher_side_imports_no_torch() -> None:
    code = (
        "import sys, digenrl.report.tables, digenrl.report.build; assert not {'torch', 'lightning'} & "
        "set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": "src", "PATH": "/usr/bin:/bin"}
    )
