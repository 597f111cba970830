"""Place a scorer in a separate process, in one for all ranks of a machine, or behind HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from digenrl.extensions.rewards.managed import ManagedScorer
from digenrl.extensions.rewards.process import ProcessScorer
from digenrl.extensions.rewards.remote import RemoteScorer
from digenrl.rewards.protocol import Scorer, plain


def place(
    name: str,
    scorer: Any,
    placement: str,
    urls: Sequence[str] | None,
    start_s: float,
    call_s: float,
) -> Callable[[], Scorer]:
    """Return a function that makes the scorer of a reward; arguments are those of
    `digenrl.rewards.placement.place_scorer`.

    Raises:
        ValueError: the placement is impossible for this scorer.
    """
    if placement == "http":
        if not urls:
            raise ValueError(
                f"Reward `{name}` is placed http: list its services under reward.urls.{name}."
            )
        return partial(RemoteScorer, urls=list(urls), deadline_s=call_s)
    if not isinstance(scorer, Mapping):
        raise ValueError(
            f"Reward `{name}` is placed in a process but its scorer is an object: "
            "pass its YAML node (`_recursive_: false`)."
        )
    own = ManagedScorer if placement == "managed" else ProcessScorer
    return partial(own, plain(scorer), start_s, call_s)
