"""What the command line finds of extensions: their commands and the planner, where they are
installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from digenrl.cli.commands import OWN, all_commands
from digenrl.cli.extensions import offered_commands
from digenrl.config.commands import Command

SHELF = """
from digenrl.config.commands import Command

COMMANDS = {"read": Command("digenrl.extensions.shelf.read", "read a book")}
"""


def write_extension(folder: Path, name: str, text: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text, encoding="utf-8")


def test_a_folder_brings_its_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import digenrl.extensions

    write_extension(tmp_path, "shelf", SHELF)
    (tmp_path / "deleted" / "__pycache__").mkdir(parents=True)
    monkeypatch.setattr(digenrl.extensions, "__path__", [str(tmp_path)])
    expected = {"read": Command("digenrl.extensions.shelf.read", "read a book")}
    assert offered_commands() == expected
    assert all_commands() == OWN | expected
    monkeypatch.delitem(sys.modules, "digenrl.extensions.shelf")


def test_a_fault_inside_an_extension_is_not_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import digenrl.extensions

    write_extension(tmp_path, "torn", "import a_library_that_nobody_has")
    monkeypatch.setattr(digenrl.extensions, "__path__", [str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="a_library_that_nobody_has"):
        offered_commands()


def test_without_any_extension_its_own_commands_and_plain_answers_are_left() -> None:
    code = (
        "import sys; sys.modules['digenrl.extensions'] = None\n"
        "from digenrl.cli.commands import OWN, all_commands\n"
        "from digenrl.cli.extensions import choose_advisor\n"
        "print(all_commands() == OWN, type(choose_advisor()).__name__, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["True", "PlainAdvisor", "False"]
