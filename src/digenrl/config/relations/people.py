"""Rules of rewards that ask people, which wait for votes on whole groups."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from digenrl.config.relations.view import Rule, View

_ASKING = ".Votes"
"""Ends the `_target_` of a scorer that asks people."""


class PeopleReward(NamedTuple):
    """A reward that asks people, as a configuration that is not checked yet has it."""

    placement: object
    per_sample: object
    """Votes that a sample takes part in."""


def people_rewards(reward: object, group: str = "rewards") -> dict[str, PeopleReward]:
    """Return name -> reward for those of the group `reward` of a configuration that ask people.

    >>> sorted(people_rewards({"rewards": {"a": {"scorer": {"_target_": "my.Votes"}}, "b": {}}}))
    ['a']
    """
    # Nothing is checked yet: any part of the group may be missing or of another type.
    entries = reward.get(group) if isinstance(reward, Mapping) else None
    found = {}
    for name, entry in entries.items() if isinstance(entries, Mapping) else ():
        scorer = entry.get("scorer") if isinstance(entry, Mapping) else None
        if isinstance(scorer, Mapping) and str(scorer.get("_target_")).endswith(_ASKING):
            found[str(name)] = PeopleReward(entry.get("placement"), scorer.get("per_sample"))
    return found


def votes_of_step(config: Mapping[str, object]) -> dict[str, int]:
    """Return reward -> votes that one RL step of a configuration asks people for. A stored
    configuration may hold anything."""
    data, found = config.get("data"), {}
    sizes = [
        _as_count(data.get(key) if isinstance(data, Mapping) else 0)
        for key in ("prompts_per_batch", "oversample", "group_size")
    ]
    for name, asking in people_rewards(config.get("reward")).items():
        votes = sizes[2] * _as_count(asking.per_sample)
        # An answer compares two samples, so it counts for both.
        found[name] = (sizes[0] + sizes[1]) * -(-votes // 2)
    return found


def _as_count(number: object) -> int:
    # A foreign file may hold a number with which the product takes all memory.
    return number if isinstance(number, int) and 0 <= number < 2**31 else 0


def _whole_groups(get: View) -> Iterator[str]:
    size, group = get("sampling.task_size"), get("data.group_size")
    for name in people_rewards(get("reward")):
        if size not in ("auto", group):
            yield (
                f"sampling.task_size = {size} with reward {name}: people compare the "
                f"data.group_size = {group} samples of a group, so they must meet in one task; set "
                f"sampling.task_size={group}."
            )
        if get("data.updates_split") == "samples" and get("algorithm.updates_per_batch") > 1:
            yield (
                f"data.updates_split = samples with reward {name}: people compare whole groups, "
                "and no task has samples of two updates; set data.updates_split=groups."
            )
        if (candidates := get("sampling.scouts.candidates")) > 1:
            yield (
                f"sampling.scouts.candidates = {candidates} with reward {name}: people would have "
                "to judge every trial sample; set sampling.scouts.candidates=1."
            )


def _vote_placement(get: View) -> Iterator[str]:
    reward = get("reward")
    for name in people_rewards(reward, "heldout"):
        yield (
            f"reward.heldout.{name}: evaluations ask nobody for votes; move it to reward.rewards, "
            "and hold out a reward that measures."
        )
    for name, asking in people_rewards(reward).items():
        placement = asking.placement or get("reward.placement")
        if placement not in ("thread", "inline"):
            yield (
                f"reward.rewards.{name}.placement = {placement}: the rank itself waits for votes; "
                "set it to thread."
            )


def _vote_packages(get: View) -> Iterator[str]:
    wanted = [("uvicorn", "serve", "the page of votes")]
    if get("sampling.frames") > 1:
        wanted.append(("imageio", "video", "showing videos"))
    for name in people_rewards(get("reward")):
        for module, extra, what in wanted:
            # For a top-level name `find_spec` imports nothing.
            if importlib.util.find_spec(module) is None:
                yield (
                    f"reward.rewards.{name}: {what} needs {module}, which is not installed; "
                    f"install the extra `{extra}` of digenrl."
                )


RULES: tuple[Rule, ...] = (_whole_groups, _vote_placement, _vote_packages)
