"""Configuration errors, reported all at once, and the "nearest valid name" that each of them offers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class ConfigError(Exception):
    """Everything that is wrong with a configuration; `problems` holds one message each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        count = len(self.problems)
        title = "1 error in the configuration" if count == 1 else f"{count} errors in the configuration"
        super().__init__("\n".join([f"{title}; nothing was started or written:", *(f"  - {p}" for p in self.problems)]))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The entry of `known` most like `name`, or None when nothing is close.

    Dotted keys are also compared by their last part, so that a key written under the wrong parent is still found.
    """
    candidates = sorted(set(known))
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.75)
    if close:
        return close[0]
    leaves: dict[str, str] = {}
    for candidate in candidates:
        leaves.setdefault(candidate.rsplit(".", 1)[-1], candidate)
    close = difflib.get_close_matches(name.rsplit(".", 1)[-1], list(leaves), n=1, cutoff=0.75)
    return leaves[close[0]] if close else None


def listing(names: Iterable[str], limit: int = 30) -> str:
    """`names` in one line, cut after `limit` entries."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:limit]) or "none"
    return shown + (f" and {len(ordered) - limit} more" if len(ordered) > limit else "")
