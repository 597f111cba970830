"""The command line of commands that have a few keys of their own, and `--help`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, WithJsonSchema

from digenrl.config.compose import with_search_path
from digenrl.config.errors import ConfigError, list_names, nearest_name
from digenrl.config.help_pages import command_help
from digenrl.config.validation import keys_of, problems_by_key
from digenrl.record.redact import redact_text

HELP = ("-h", "--help")
# Not Path.expanduser, which ends with a traceback where nobody knows the user.
_Expanded = AfterValidator(lambda path: Path(os.path.expanduser(path)))
RunDirectory = Annotated[Path, _Expanded, WithJsonSchema({"phrase": "path of a run directory"})]
Folder = Annotated[Path, _Expanded, WithJsonSchema({"phrase": "path of a directory"})]
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
    known = list_names(own)
    problems = [
        f"{redact_text(word)}: settings are key=value; keys: {known}."
        for word in words
        if "=" not in word
    ]
    # The last of equal keys wins, as in Hydra.
    given = {key: value for key, is_pair, value in pairs if is_pair and (key in own or not others)}
    rest = [
        word
        for word, (key, is_pair, _) in zip(words, pairs, strict=True)
        if is_pair and key not in own
    ]

    def unknown_message(key: str, value: object) -> str:
        close = nearest_name(key, own)
        hint = f"nearest: {close}" if close else f"keys: {known}"
        return f"{key} = {redact_text(str(value))}: no such key; {hint}."

    problems += problems_by_key(schema, given, unknown_message).values()
    if problems:
        raise ConfigError(problems)
    # Not strict: the values are text, of which pydantic makes numbers.
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
        show_page(command_help(doc, schema))
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


def show_page(page: str) -> None:
    """Print a page of help. A reader such as `head` or `less` may quit before its end."""
    try:
        print(page, flush=True)
    except BrokenPipeError:
        # Python flushes once more as it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
