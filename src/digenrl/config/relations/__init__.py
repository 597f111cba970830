"""Rules that relate several keys. Each is a small function that yields messages.

`batches` has the rules of samples, groups and updates, `ranks` those of ranks, pools and lines, and
`methods` those of single algorithms and models. To add a rule, write it there and add it to the
`RULES` at the end of its file. The rules are applied twice: to the configuration as written, and
again when `auto` has become numbers.
"""

from __future__ import annotations

from collections.abc import Collection

from digenrl.config.relations import batches, methods, ranks
from digenrl.config.relations.methods import needs_whole_groups
from digenrl.config.relations.view import Absent, Tree, View, most_rollouts, needs_whole_batch

__all__ = ["most_rollouts", "needs_whole_batch", "needs_whole_groups", "relation_problems"]


def relation_problems(tree: Tree, broken: Collection[str] = ()) -> list[str]:
    """Return what is wrong between keys. Rules that read a key of `broken` stay silent."""
    view = View(tree, broken)
    problems: list[str] = []
    for rule in (*batches.RULES, *ranks.RULES, *methods.RULES):
        try:
            problems += rule(view)
        except Absent:
            continue
    return problems
