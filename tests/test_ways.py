"""The counts of docs/design.md's section 4 are those of `scripts.ways`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.processes
def test_the_page_counts_the_files_on_each_way() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.ways"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    counted = dict(re.findall(r"^(\w+): (\d+) files", done.stdout, re.MULTILINE))
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    (told,) = re.findall(
        r"passes (\d+) files to the\s+loss, (\d+) to a loan and (\d+) to a\s+publication", page
    )
    assert told == (counted["loss"], counted["lending"], counted["publication"])
