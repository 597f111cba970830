"""What a plan says, and what its page explains."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

from digenrl.extensions.planner.plan_text import candidate_table

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_planners_columns_are_explained() -> None:
    explained = re.findall(
        r"^\| ([^|]+?) \|", (DOCS / "planner.md").read_text(encoding="utf-8"), re.MULTILINE
    )[1:]
    nodes = ast.walk(ast.parse(inspect.getsource(candidate_table)))
    texts = {str(node.value).strip() for node in nodes if isinstance(node, ast.Constant)}
    assert len(explained) == 13
    assert set(explained) - {"waiting"} <= texts, "waiting has a line of its own"


def test_advice_and_plans_leave_torch_out() -> None:
    code = (
        "import digenrl.extensions.planner.advice, digenrl.extensions.planner.cli.plan, sys; "
        "print(sorted({'torch', 'lightning', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
