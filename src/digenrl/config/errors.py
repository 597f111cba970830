"""Configuration errors, reported all at once, and the "nearest valid name" that each of them
offers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from digenrl.record.run_dir import printable_text

MOST_SHOWN = 100
"""Most problems of one error, and most names to which the nearest one is looked for."""


class ConfigError(Exception):
    """Everything that is wrong with a configuration; `problems` holds one message each."""

    def __init__(self, problems: Sequence[str]) -> None:
        # Keys, values and names come from anywhere; a terminal must obey nothing in them.
        shown = ("\n".join(map(printable_text, problem.split("\n"))) for problem in problems)
        # Several checks may say the same.
        every = tuple(dict.fromkeys(shown))
        self.problems, count = every[:MOST_SHOWN], len(every)
        title = (
            "1 error in the configuration" if count == 1 else f"{count} errors in the configuration"
        )
        super().__init__(
            "\n".join(
                [
                    f"{title}; nothing was started or written:",
                    *(f"  - {p}" for p in self.problems),
                    *([f"  ... and {count - MOST_SHOWN} more"] if count > MOST_SHOWN else []),
                ]
            )
        )


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the entry of `known` most like `name` in any case of letters, or None when nothing is
    close.

    A dotted key is looked for in three places. First among the children of its own parent. Then by
    its last part under any parent, the shortest path first (`sampling.steps` before
    `sampling.eval.steps`). Then as a whole. At last, the shortest that contains `name` counts.
    """
    # Case does not count, and the answer is spelled as the key is.
    name, spelled = name.lower(), {its.lower(): its for its in known}
    candidates = sorted(spelled, key=lambda key: (key.count("."), key))
    parent, _, leaf = name.rpartition(".")
    siblings = {
        its.rpartition(".")[2]: its for its in candidates if its.rpartition(".")[0] == parent
    }
    # Reversed, so that of equal last parts the shortest path stays.
    leaves = {its.rpartition(".")[2]: its for its in reversed(candidates)}
    # Siblings are few, so a looser likeness serves among them.
    close = difflib.get_close_matches
    found = (
        [siblings[its] for its in close(leaf, siblings, cutoff=0.7)]
        or [leaves[its] for its in leaves if its == leaf]
        or close(name, candidates, cutoff=0.8)
        or [leaves[its] for its in close(leaf, leaves, cutoff=0.8)]
        or sorted((its for its in candidates if len(name) > 2 and name in its), key=len)
    )
    return spelled[found[0]] if found else None


def list_names(names: Iterable[str]) -> str:
    """Return `names` in one line, each once."""
    return ", ".join(sorted(set(names))) or "none"
