"""The text of `--help`, and the command line of commands that have a few keys of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, WithJsonSchema

from digenrl.config.compose import composed, group_options, own_directories, with_search_path
from digenrl.config.errors import ConfigError, listing, nearest
from digenrl.config.schema import TrainKeys, may_change, schema_of
from digenrl.config.shipped import config_directory
from digenrl.config.validation import Key, keys_of, problems_by_key, shown
from digenrl.record.redact import redact_text

HELP = ("-h", "--help")
RunDirectory = Annotated[Path, WithJsonSchema({"phrase": "path of a run directory"})]
Folder = Annotated[Path, WithJsonSchema({"phrase": "path of a directory"})]
Own = TypeVar("Own", bound="Arguments")


class Arguments(BaseModel):
    """Base class for the keys of a command, read from key=value words."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def read_arguments(
    schema: type[Own], words: Sequence[str], others: bool = False
) -> tuple[Own, list[str]]:
    """Return the command's own keys, and the other key=value words.

    Args:
        others: whether further keys are allowed, namely those of a configuration.

    Raises:
        ConfigError: the error has everything that is wrong.
    """
    own = keys_of(schema)
    pairs = [word.partition("=") for word in words]
    known = listing(own)
    problems = [
        f"{redact_text(word)}: settings are key=value; keys: {known}."
        for word in words
        if "=" not in word
    ]
    given = {key: value for key, is_pair, value in pairs if is_pair and (key in own or not others)}
    rest = [
        word
        for word, (key, is_pair, _) in zip(words, pairs, strict=True)
        if is_pair and key not in own
    ]

    def unknown(key: str, value: Any) -> str:
        close = nearest(key, own)
        hint = f"nearest: {close}" if close else f"keys: {known}"
        return f"{key} = {redact_text(str(value))}: no such key; {hint}."

    problems += problems_by_key(schema, given, unknown).values()
    if problems:
        raise ConfigError(problems)
    return schema.model_validate(given), rest if others else []


def own_command(
    schema: type[Own],
    doc: str | None,
    words: Sequence[str],
    work: Callable[[Own, list[str]], None],
    others: bool = False,
    failures: type[Exception] | tuple[()] = (),
) -> int:
    """Run `work` with what `read_arguments` read, or print for `--help` a page that begins with
    `doc`.

    Returns:
        The exit code. 0 is success. 2 means that arguments, files or configuration do not fit. 1
            stands for an exception of `failures`. The error is printed to stderr.
    """
    if wants_help(words):
        show(command_help(doc, schema))
        return 0
    try:
        work(*read_arguments(schema, with_search_path(words), others))
    except (ConfigError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except failures as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def wants_help(words: Sequence[str]) -> bool:
    """Return whether a command line asks for help."""
    return any(word in HELP for word in words)


def show(page: str) -> None:
    """Print a page of help. A reader such as `head` or `less` may quit before its end."""
    try:
        print(page, flush=True)
    except BrokenPipeError:
        # Python flushes once more as it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def command_help(text: str | None, schema: type[BaseModel] | None = None) -> str:
    """Return the help page of a command with keys of its own: its docstring, and the keys."""
    lines = [(text or "").strip()]
    if schema is not None:
        keys = keys_of(schema)
        defaults = {
            key: "required" if its.required else shown(its.default) for key, its in keys.items()
        }
        lines += ["\nkeys (key=value):", *_key_lines(keys, defaults)]
    return "\n".join(lines)


def configuration_help(config_name: str, text: str | None = None, words: Sequence[str] = ()) -> str:
    """Return the help page of a command that composes configs/<config_name>.yaml.

    The page lists the groups with their options, including those of directories that `words` name.
    Then it lists the keys with their default values.
    """
    options = group_options(config_directory(), *own_directories(words))
    keys, defaults = keys_of(schema_of(config_name)), defaults_of(config_name)
    whole = issubclass(schema_of(config_name), TrainKeys)
    groups = {name: names for name, names in options.items() if whole or name == "reward"}
    return "\n".join(
        [
            (text or f"digenrl {config_name} [group=option ...] [key=value ...]").strip(),
            "\ngroups (group=option):",
            *(f"  {name:<24}{listing(names)}" for name, names in groups.items()),
            "\nkeys (key=value; +key=value adds one, ~key removes one), with the value where "
            "nothing is said" + ("; keys with * may change on resume:" if whole else ":"),
            *_key_lines(keys, defaults),
        ]
    )


def _key_lines(keys: Mapping[str, Key], defaults: Mapping[str, str]) -> list[str]:
    lines = []
    for key, its in keys.items():
        mark = "*" if may_change(key) else " "
        lines.append(
            f"{mark} {f'{key} = {defaults[key]}' if key in defaults else key:<42}  {its.allowed}"
        )
        lines += [f"      {its.meaning}"] if its.meaning else []
    return lines


def defaults_of(config_name: str) -> dict[str, str]:
    """Return key -> its default value, for the keys that have one."""
    try:
        tree = composed(config_name, [])
    except ConfigError:  # a group has no default: what the primary file itself says
        primary = OmegaConf.load(config_directory() / f"{config_name}.yaml")
        assert isinstance(primary, DictConfig)
        tree = primary
    found = {}
    for key in keys_of(schema_of(config_name)):
        node = OmegaConf.select(tree, key, default=tree, throw_on_missing=False)
        if node is not tree and not OmegaConf.is_dict(node) and not OmegaConf.is_missing(tree, key):
            found[key] = shown(node)
    return found
