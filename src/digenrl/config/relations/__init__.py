"""Rules that relate several keys. Each is a small function that yields messages.

`batches` has the rules of samples, groups and updates, `ranks` those of ranks, pools and lines,
`methods` those of single algorithms and models, and `people` those of rewards that ask people. To
add a rule, write it there and add it to the `RULES` at the end of its file. The rules are applied
twice: to the configuration as written, and again when `auto` has become numbers.
"""

from __future__ import annotations

from collections.abc import Collection

from digenrl.config.relations import batches, methods, people, ranks
from digenrl.config.relations.methods import needs_whole_groups
from digenrl.config.relations.people import people_rewards, votes_of_step
from digenrl.config.relations.ranks import saves_bytes
from digenrl.config.relations.view import Absent, Tree, View, most_rollouts, needs_whole_batch

__all__ = [
    "most_rollouts",
    "needs_whole_batch",
    "needs_whole_groups",
    "people_rewards",
    "relation_problems",
    "saves_bytes",
    "votes_of_step",
]


def relation_problems(tree: Tree, broken: Collection[str] = ()) -> list[str]:
    """Return what is wrong between keys. Rules that read a key of `broken` stay silent."""
    view = View(tree, broken)
    problems: list[str] = []
    for rule in (*batches.RULES, *ranks.RULES, *methods.RULES, *people.RULES):
        try:
            problems += rule(view)
        # Another check has said what is wrong with a key that this rule reads.
        except Absent:
            continue
    return problems
