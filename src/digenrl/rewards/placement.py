"""Place a scorer: in this process (`inline`, `thread`), in a separate process, in one for all ranks
of a machine (`managed`), or behind HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from digenrl.rewards.managed import ManagedScorer
from digenrl.rewards.needs import PLACEMENTS, needs_sound
from digenrl.rewards.process import ProcessScorer
from digenrl.rewards.protocol import Scorer, build_scorer, plain_node
from digenrl.rewards.remote import RemoteScorer


def place_scorer(
    name: str,
    scorer: Scorer | Mapping[str, object],
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
    if isinstance(scorer, Mapping):
        if "_target_" not in scorer:
            raise ValueError(
                f"The scorer of reward `{name}` has no `_target_`; got keys "
                f"{sorted(map(str, scorer))}."
            )
    elif not callable(scorer):
        raise ValueError(
            f"The scorer of reward `{name}` is {scorer!r}: give a callable or a YAML node with "
            "`_target_`."
        )
    if placement not in ("inline", "thread"):
        return _remote_maker(name, scorer, placement, urls, start_s, call_s)
    if isinstance(scorer, Mapping):
        return partial(build_scorer, scorer)
    made = scorer
    return lambda: made


def _remote_maker(
    name: str,
    scorer: object,
    placement: str,
    urls: Sequence[str] | None,
    start_s: float,
    call_s: float,
) -> Callable[[], Scorer]:
    """Return a function that makes the scorer of a reward in another process."""
    if placement == "http":
        if not urls:
            raise ValueError(
                f"Reward `{name}` is placed http: list its services under reward.urls.{name}."
            )
        hears = needs_sound(scorer)
        return partial(RemoteScorer, urls=list(urls), deadline_s=call_s, hears=hears)
    if not isinstance(scorer, Mapping):
        raise ValueError(
            f"Reward `{name}` is placed in a process but its scorer is an object: "
            "pass its YAML node (`_recursive_: false`)."
        )
    own = ManagedScorer if placement == "managed" else ProcessScorer
    return partial(own, plain_node(scorer), start_s, call_s)
