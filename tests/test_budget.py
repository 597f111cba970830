"""How much code a new owner answers for, room by room, beside the budget of each room.

A line of code holds a token: blank lines, comments and docstrings do not count. `python -m tests.test_budget` prints
the table. `ceiling` is what a room has now where it is above its budget: it may shrink, and never grow.
"""

from __future__ import annotations

import ast
import io
import tokenize
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "digenrl"
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Room:
    """Files that share a budget."""

    budget: int
    """Lines of code that the design grants."""
    parts: tuple[str, ...]
    """Folders and files below src/digenrl."""
    ceiling: int = 0
    """Lines of code that are there now, where they are more than the budget."""

    @property
    def most(self) -> int:
        """Lines of code above which the test fails."""
        return max(self.budget, self.ceiling)


CORE = {
    "types, run, data, devices, api": Room(1100, ("types.py", "run.py", "data.py", "devices.py", "api.py")),
    "schedule": Room(1100, ("schedule",)),
    "strategy": Room(1600, ("strategy",)),
    "transport": Room(700, ("transport",)),
    "cluster": Room(1500, ("cluster",)),
    "diffusion": Room(550, ("diffusion",)),
    "algorithms, rollout": Room(1250, ("algorithms", "rollout")),
    "models": Room(1600, ("models",)),
    "rewards": Room(650, ("rewards",)),
    "record": Room(500, ("record",)),
    "callbacks": Room(500, ("callbacks",)),
    "config": Room(1500, ("config",)),
    "cli": Room(500, ("cli",)),
    "report": Room(600, ("report",)),
}
EXTENSIONS = {
    "planner": 3300, "zoo": 1900, "tasks": 1300, "page": 1000, "rewards": 1200, "bench": 700, "launchers": 600,
    "links": 500, "records": 350, "scouts": 250,
}  # fmt: skip


def lines_of_code(path: Path) -> int:
    """Return the physical lines of a file that hold code."""
    text = path.read_text(encoding="utf-8")
    bodies = (getattr(node, "body", None) for node in ast.walk(ast.parse(text)))
    texts = (
        item
        for body in bodies
        if isinstance(body, list)
        for item in body
        if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and isinstance(item.value.value, str)
    )
    prose = {line for item in texts for line in range(item.lineno, (item.end_lineno or item.lineno) + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {line for t in tokens if t.type not in SILENT for line in range(t.start[0], t.end[0] + 1)}
    return len(code - prose)
