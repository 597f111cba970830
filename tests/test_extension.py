"""The one way from the core to an extension: by name, with an error that helps where the folder was
deleted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from digenrl.extension import ExtensionMissing, extension, installed

ROOT = Path(__file__).resolve().parents[1]


def test_an_extension_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import digenrl.extensions

    (tmp_path / "shelf").mkdir()
    (tmp_path / "shelf" / "__init__.py").touch()
    (tmp_path / "shelf" / "books.py").write_text("NUMBER = 7\n", encoding="utf-8")
    (tmp_path / "deleted" / "__pycache__").mkdir(parents=True)
    monkeypatch.setattr(digenrl.extensions, "__path__", [str(tmp_path)])
    assert installed("shelf")
    assert extension("digenrl.extensions.shelf.books.NUMBER", "number = 7", "use number=0") == 7
    assert not installed("deleted")
    said = (
        "number = 7: needs digenrl.extensions.deleted, which this installation lacks; use number=0."
    )
    with pytest.raises(ExtensionMissing, match=re.escape(said)):
        extension("digenrl.extensions.deleted.books.NUMBER", "number = 7", "use number=0")


def test_a_fault_inside_an_extension_is_not_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import digenrl.extensions

    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "__init__.py").write_text(
        "import a_library_that_nobody_has\n", encoding="utf-8"
    )
    monkeypatch.setattr(digenrl.extensions, "__path__", [str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="a_library_that_nobody_has"):
        extension("digenrl.extensions.torn.ANYTHING", "a = b", "use a=c")


def test_only_extensions_are_reached_this_way() -> None:
    with pytest.raises(ValueError, match=r"os\.system: an extension lies in digenrl\.extensions"):
        extension("os.system", "a = b", "use a=c")


def test_a_core_without_any_extension_says_so() -> None:
    code = (
        "import sys; sys.modules['digenrl.extensions'] = None\n"
        "from digenrl.extension import installed\n"
        "print(installed('links'), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["False", "False"]
