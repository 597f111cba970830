"""Docstrings and comments name methods that exist: a renamed method is renamed there too."""

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


def strangers(text: str) -> list[str]:
    """Return the members that a source text names of our classes, and that these do not have."""
    named = (found.groups() for prose in prose_of(text) for found in NAMED.finditer(prose))
    known = members()
    return sorted(
        {
            f"{owner}.{member}"
            for owner, member in named
            if owner in known and member not in known[owner] and member not in FILES
        }
    )


@pytest.mark.parametrize("prose", ['"""See `Claims.give`."""', "# `Claims.give` relies on this"])
def test_a_member_that_is_not_there_is_found(prose: str) -> None:
    assert strangers(prose) == ["Claims.give"]


def test_members_that_are_there_pass() -> None:
    assert not strangers('"""`Claims.give_task`, `World.rank` and numpy\'s Array.shape."""')


def test_no_page_names_a_member_that_is_not_there() -> None:
    found = {
        file.relative_to(ROOT).as_posix(): names
        for file in SOURCES
        if (names := strangers(file.read_text(encoding="utf-8")))
    }
    assert not found
