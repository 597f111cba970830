"""`--help` of every command: its keys with type, default, range and meaning, at once and without
torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from digenrl.cli.commands import all_commands

pytestmark = pytest.mark.processes

COMMANDS = {
    "train": (
        "schedule.gap = 1",
        "whole number >= 0",
        "Number of groups in a fragment",
        "experiment ",
    ),
    "plan": (
        "plan.show = 10",
        "whole number >= 1",
        "candidates that are printed",
        "schedule.gap = 1",
    ),
    "profile": ("pool = null", "Pool of the profile", "schedule.gap = 1"),
    "report": ("run = required", "path of a run directory"),
    "join": (
        "run = required",
        "address = null",
        "HOST:PORT of the run's control store",
        "device = 0",
    ),
    "eval": ("step = last", "base | last", "or the last checkpoint as well"),
    "benchmark": (
        "suite = required",
        "geneval | dpg | parti | vbench | scenes",
        "threshold = 0.3",
        "the base model",
    ),
    "vote": ("run = required", "open = true", "opened in a browser"),
    "export": ("weights = evaluated", "evaluated | trained | average", "moving average"),
    "score": (
        "batch = 16",
        "whole number >= 1",
        "files that are read and scored together",
        "images ",
    ),
    "serve-reward": ("port = 8700", "whole number >= 0 and <= 65535", "limits.max_pending = 4"),
    "new": ("kind = required", "experiment | hardware | model | reward", "name = required"),
    "check": ("self-check", "lists all that this run lacks"),
    "fetch": ("list = false", "and download nothing"),
    "list": ("first sentence of its file", "none left out"),
}


def test_no_command_is_left_out() -> None:
    assert set(all_commands()) - {"resume"} == set(COMMANDS)  # it is a page of `train`


CODE = """
import contextlib, io, json, sys
from digenrl.cli.main import main
pages = {}
for name in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as page:
        try:
            code = main([name, "--help"])
        except SystemExit as end:
            code = end.code
    pages[name] = code or 0, page.getvalue(), "torch" in sys.modules
print(json.dumps(pages))
"""


@pytest.fixture(scope="module")
def pages() -> dict[str, tuple[int, str, bool]]:
    """Command -> exit code of its `--help`, page, and whether torch was imported; in one
    process."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, *COMMANDS], capture_output=True, text=True, timeout=200, check=True
    )  # fmt: skip
    assert done.stderr == ""
    found: dict[str, tuple[int, str, bool]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_the_keys_without_torch(
    pages: dict[str, tuple[int, str, bool]], name: str
) -> None:
    code, page, has_torch = pages[name]
    assert (code, has_torch) == (0, False)
    for part in (f"digenrl {name}", *COMMANDS[name]):
        assert part in page
