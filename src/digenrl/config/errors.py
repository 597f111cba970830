"""Configuration errors, reported all at once, and the "nearest valid name" that each of them
offers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class ConfigError(Exception):
    """Everything that is wrong with a configuration; `problems` holds one message each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        count = len(self.problems)
        title = (
            "1 error in the configuration" if count == 1 else f"{count} errors in the configuration"
        )
        super().__init__(
            "\n".join(
                [f"{title}; nothing was started or written:", *(f"  - {p}" for p in self.problems)]
            )
        )


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the entry of `known` most like `name` in any case of letters, or None when nothing is
    close.

    A dotted key is looked for in three places. First among the children of its own parent. Then by
    its last part under any parent, the shortest path first (`sampling.steps` before
    `sampling.eval.steps`). Then as a whole. At last, the shortest that contains `name` counts.
    """
    spelled = {its.lower(): its for its in known}
    found = _nearest(name.lower(), spelled)
    return None if found is None else spelled[found]


def _nearest(name: str, known: Iterable[str]) -> str | None:
    candidates = sorted(known, key=lambda key: (key.count("."), key))
    parent, _, leaf = name.rpartition(".")
    siblings = {
        its.rpartition(".")[2]: its for its in candidates if its.rpartition(".")[0] == parent
    }
    leaves = {its.rpartition(".")[2]: its for its in reversed(candidates)}
    if close := difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.7):
        return siblings[close[0]]
    if leaf in leaves:
        return leaves[leaf]
    if close := difflib.get_close_matches(name, candidates, n=1, cutoff=0.8):
        return close[0]
    if close := difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.8):
        return leaves[close[0]]
    holding = [its for its in candidates if len(name) > 2 and name in its]
    return min(holding, key=len, default=None)


def listing(names: Iterable[str]) -> str:
    """Return `names` in one line."""
    return ", ".join(sorted(names)) or "none"
