"""Place a scorer: in this process (`inline`, `thread`), in a separate process, in one for all ranks
of a machine (`managed`), or behind HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from digenrl.extension import extension
from digenrl.rewards.protocol import Scorer, build_scorer

PLACEMENTS = ("inline", "thread", "process", "managed", "http")


def place_scorer(
    name: str,
    scorer: Any,
    placement: str,
    urls: Sequence[str] | None,
    start_s: float,
    call_s: float,
) -> Callable[[], Scorer]:
    """Return a function that makes the scorer of a reward in its place. Nothing is loaded before
    its call.

    Args:
        name: the reward's name, for messages.
        scorer: a scorer, or the YAML node that describes one (`_target_` and its arguments).
        placement, start_s, call_s: see `RewardSuite`. `http` needs `urls`, `process` and
            `managed` the YAML node.

    Raises:
        ValueError: the placement is unknown, or impossible for this scorer.
    """
    if placement not in PLACEMENTS:
        raise ValueError(
            f"Placement `{placement}` of reward `{name}` is unknown; known: "
            f"{', '.join(PLACEMENTS)}."
        )
    described = isinstance(scorer, Mapping)
    if described and "_target_" not in scorer:
        raise ValueError(
            f"The scorer of reward `{name}` has no `_target_`; got keys {sorted(map(str, scorer))}."
        )
    if not described and not callable(scorer):
        raise ValueError(
            f"The scorer of reward `{name}` is {scorer!r}: give a callable or a YAML node with "
            "`_target_`."
        )
    if placement not in ("inline", "thread"):
        elsewhere = extension(
            "digenrl.extensions.rewards.elsewhere.place",
            f"placement = {placement} of reward `{name}`",
            "place the reward inline or thread",
        )
        placed: Callable[[], Scorer] = elsewhere(name, scorer, placement, urls, start_s, call_s)
        return placed
    return partial(build_scorer, scorer) if described else lambda: scorer
