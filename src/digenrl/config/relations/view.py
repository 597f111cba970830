"""What a rule sees of a configuration, and what several rules ask."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import accumulate
from typing import Any, Literal

Tree = Mapping[str, Any]


class Absent(Exception):
    """A key that a rule reads is absent, or something is wrong with it that was said already."""


class View:
    """The values of a configuration that nothing was wrong with so far.

    Args:
        tree: the configuration, as plain mappings.
        broken: dotted keys that something is wrong with.

    Example:
        >>> view = View({"data": {"group_size": 8, "oversample": -1}}, {"data.oversample"})
        >>> view("data.group_size")
        8
        >>> view("data.oversample")
        Traceback (most recent call last):
        ...
        digenrl.config.relations.view.Absent: data.oversample
    """

    def __init__(self, tree: Tree, broken: Collection[str]) -> None:
        self._tree = tree
        # A broken "a.b.c" breaks "a" and "a.b" too, because a rule may read a whole group.
        self._broken = {
            part for key in broken for part in accumulate(key.split("."), "{}.{}".format)
        }

    def __call__(self, key: str) -> Any:
        """Return the value of a dotted key.

        Raises:
            Absent: no rule may read the key.
        """
        node: Any = self._tree
        for part in key.split("."):
            if key in self._broken or not isinstance(node, Mapping) or part not in node:
                raise Absent(key)
            node = node[part]
        return node


Rule = Callable[[View], Iterator[str]]
"""Yields a message for each contradiction that it finds."""


def most_rollouts(
    rollouts: int | Literal["auto"] | Mapping[Literal["min", "max"], int],
) -> int | Literal["auto"]:
    """Return the largest number of rollouts that `allocation.rollouts` asks for: the number itself,
    or `max`; auto stays."""
    return rollouts["max"] if isinstance(rollouts, Mapping) else rollouts


def needs_whole_batch(advantage: Mapping[str, object]) -> bool:
    """Return whether the advantages of `algorithm.advantage` need every reward of the batch. Then
    no group can be trained before the others are complete, and `schedule.gap` must be 0."""
    return advantage.get("std") in ("batch", "max_group") or bool(advantage.get("renormalise"))


def divisors(number: int) -> str:
    """Return the divisors of a number, as messages list them.

    Example:
        >>> divisors(12)
        '1, 2, 3, 4, 6, 12'
    """
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
