"""The common part of commands around one option of the group `reward`: configuration, suite and
exit codes."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from digenrl.config import ConfigError, config_directory, group_options
from digenrl.config.checks import problems_of, resolve_tree
from digenrl.config.command_settings import scorer_settings_of
from digenrl.config.compose import (
    KnownKeys,
    compose_words,
    own_directories,
    with_search_path,
)
from digenrl.config.help import show_page, wants_help
from digenrl.config.help_pages import configuration_help
from digenrl.config.loading import command_line_list, keys_set_by
from digenrl.config.reaching import reaching_problems
from digenrl.config.relations import people_rewards
from digenrl.config.settings import ScorerSettings
from digenrl.config.words import quote_value
from digenrl.rewards.needs import require_weights

if TYPE_CHECKING:
    from digenrl.rewards.suite import RewardSuite

_PATH_KEYS = ("images", "prompts", "output")


def reward_command(
    name: str, doc: str | None, argv: Sequence[str], work: Callable[[Any], None]
) -> int:
    """Run `work` with the checked configs/<name>.yaml, and return the exit code.

    0 stands for success, 1 for work that could not be done, 2 for a wrong command line.
    """
    if wants_help(argv):
        show_page(configuration_help(name, doc, with_search_path(argv)))
        return 0
    try:
        settings = reward_config(argv, name)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    from digenrl.rewards.protocol import RewardError

    try:
        work(settings)
    except (RewardError, ValueError, KeyError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0


def reward_config(argv: Sequence[str], name: str) -> ScorerSettings:
    """Return configs/<name>.yaml with the words of `argv`, checked. Raises ConfigError with every
    problem that was found."""
    words = with_search_path(argv)
    if odd := [word for word in words if word.startswith("-") or "=" not in word]:
        raise ConfigError([f"{word}: settings are key=value (see --help)." for word in odd])
    if not any(word.startswith("reward=") for word in words):
        known = ", ".join(group_options(config_directory(), *own_directories(words))["reward"])
        raise ConfigError([f"reward=... is missing; known: {known}."])
    tree, problems = compose_words([_quote_path(word) for word in words], name)
    found = OmegaConf.masked_copy(tree, [str(key) for key in tree if key != "hydra"])
    OmegaConf.set_struct(found, False)
    found.allow_targets = command_line_list("allow_targets", words, found)
    plain, unresolved = resolve_tree(found)
    problems += problems_of(plain, unresolved, name, KnownKeys(found, name), found.allow_targets)
    problems += reaching_problems(plain, keys_set_by(words))
    problems += [
        f"reward.rewards.{asks}: asks people on the page of a run, and {name} has no run; name "
        "another reward."
        for asks in people_rewards(plain.get("reward"))
    ]
    if problems:
        raise ConfigError(problems)
    settings = scorer_settings_of(name).from_tree(plain)
    try:
        require_weights(settings.node_at("reward"))
    except ValueError as error:
        raise ConfigError(str(error).splitlines()) from None
    return settings


def reward_suite(settings: ScorerSettings) -> RewardSuite:
    """Return the suite of a checked configuration. Exceptions of its scorers' constructors become a
    ValueError."""
    try:
        suite: RewardSuite = settings.build("reward")
        suite.build_scorers()
        return suite
    except Exception as error:
        raise ValueError(f"reward: {error}") from error


def _quote_path(word: str) -> str:
    """Return a path in a form that Hydra reads literally."""
    key, _, value = word.partition("=")
    plain = key not in _PATH_KEYS or re.fullmatch(r"[\w./-]+|'.*'|\".*\"", value)
    return word if plain else f"{key}={quote_value(value)}"
