"""Docstrings and comments name what exists: who renames a method renames it there too."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(file for room in ("src", "reward_models") for file in (ROOT / room).rglob("*.py"))
NAMED = re.compile(r"(?<![\w.])([A-Z][A-Za-z]+)\.([a-z_]+)(?!\w|\.)")
"""A class and one of its members, as in `Claims.give_task`."""
DOTTED = re.compile(r"`(digenrl(?:\.[A-Za-z_]\w*){2,})`")
"""A module of ours, or a name in one."""
FILES = ("py", "pt", "json", "yaml")
"""Endings of files, whose names look like members."""


@cache
def members() -> dict[str, set[str]]:
    """Return class of ours -> names of its attributes and methods, inherited ones included."""
    own, bases = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                # Attributes of instances too: every `self.name` and every field.
                own[node.name] |= {
                    getattr(part, "name", getattr(part, "attr", getattr(part, "id", "")))
                    for part in ast.walk(node)
                }
                bases[node.name] |= {ast.unparse(base).split("[")[0] for base in node.bases}

    def inherited(name: str, below: frozenset[str] = frozenset()) -> set[str]:
        # `below`: a class may have the name of its base in another package.
        above = {base.rpartition(".")[2] for base in bases.get(name, ())} - below - {name}
        return set(own.get(name, ())).union(*(inherited(base, below | {name}) for base in above))

    return {name: inherited(name) for name in own}


def prose_of(text: str) -> Iterator[str]:
    """Yield the docstrings and the comments of a source text."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def resolves(path: str) -> bool:
    """Return whether a dotted path is a module of ours, or a name that its module has."""
    *parents, last = path.split(".")
    folder = (ROOT / "src").joinpath(*parents)
    if (folder / last).is_dir() or (folder / f"{last}.py").is_file():
        return True
    for file in (folder.with_suffix(".py"), folder / "__init__.py"):
        if file.is_file():
            return re.search(rf"\b{last}\b", file.read_text(encoding="utf-8")) is not None
    # Otherwise the last part is a member of a class.
    return bool(parents) and folder.name in members() and last in members()[folder.name]


def strangers(text: str) -> list[str]:
    """Return the members of our classes and the dotted names that a source text names, and that are
    not there."""
    prose, known = [*prose_of(text)], members()
    named = (found.groups() for each in prose for found in NAMED.finditer(each))
    dotted = {found[1] for each in prose for found in DOTTED.finditer(each)}
    absent = {
        f"{owner}.{member}"
        for owner, member in named
        if owner in known and member not in known[owner] and member not in FILES
    }
    return sorted(absent | {path for path in dotted if not resolves(path)})


@pytest.mark.parametrize(
    ("prose", "name"),
    [
        ('"""See `Claims.give`."""', "Claims.give"),
        ("# `Claims.give` relies on this", "Claims.give"),
        ('"""As `digenrl.accelerator.mark`."""', "digenrl.accelerator.mark"),
    ],
)
def test_a_name_that_is_not_there_is_found(prose: str, name: str) -> None:
    assert strangers(prose) == [name]


def test_names_that_are_there_pass() -> None:
    ours = "`Claims.give_task`, `World.rank`, `digenrl.settle`, `digenrl.accelerator.mark_work`"
    assert not strangers(f'"""{ours} and Array.shape of numpy."""')


def test_no_page_names_what_is_not_there() -> None:
    found = {
        file.relative_to(ROOT).as_posix(): names
        for file in SOURCES
        if (names := strangers(file.read_text(encoding="utf-8")))
    }
    assert not found
