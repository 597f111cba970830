"""Paths among the values of keys. Each becomes absolute, with `~` expanded, once: where the words
of a command line and the YAML files are read. A rank, a resumed run and an evaluation may have
other working directories.

- A key whose type is a path (`value_types`) always holds a path, except for the name of a file of
  digenrl/prompts: that stays a name.
- A key of a component (a node with `_target_`) holds a path in three cases. The value begins with
  `~/`, `./` or `../`. The value is the name of a file that exists here. Or the key is one of
  `NAMES` and the value exists here. Hub ids and other words stay as they are.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from digenrl import prompts
from digenrl.config.command_settings import schema_of
from digenrl.config.errors import ConfigError
from digenrl.config.targets import walk_nodes
from digenrl.config.validation import keys_of

NAMES = (
    "path",
    "reference",
    "processor",
    "prompts",
    "heldout_prompts",
    "file",
    "folder",
    "directory",
    "run",
)
"""Keys of components that hold a path, where their value is no hub id or name."""
_PROMPTS = ("prompts", "heldout_prompts")
_MARKS = ("~", "./", "../")


def absolute_paths(tree: object, config_name: str) -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, path as written, absolute path) for each path in `tree` that is not
    written so.

    Args:
        tree: plain dicts and lists. Texts with an interpolation are left out.
        config_name: name of the schema that says which keys are paths.
    """
    typed = typed_paths(config_name)
    # By its own target: what lies below a component is its argument, at any depth.
    components = {
        path for path, node in walk_nodes(tree) if isinstance(node, Mapping) and "_target_" in node
    }
    for path, value in walk_nodes(tree):
        # "???" marks a value that is still to be given.
        if not isinstance(value, str) or value.strip() in ("", "???") or "${" in value:
            continue
        key = path.partition("[")[0]
        if key in typed:
            kind = typed[key]
            if kind != "own":  # the prompts of a file, or a list of such files
                found = _prompt_file(value) if key == path or path.endswith(".file") else value
            else:
                found = value if value == "auto" else absolute_path(value)
        elif _lies_in_one_of(path, components):
            found = _of_component(path.rpartition(".")[2].partition("[")[0], path, value)
        else:
            continue
        if found != value:
            yield path, value, found


def absolute_path(value: str) -> str:
    """Return `value` as an absolute path. Links and `..` in it stay.

    >>> absolute_path("/runs/../mine")
    '/runs/../mine'

    Raises:
        ConfigError: it begins with the home of a user who is not known, or is an address.
    """
    if "://" in value:
        raise ConfigError([f"{value}: is an address; name a file or directory of this machine."])
    expanded = os.path.expanduser(value)
    if expanded.startswith("~"):
        user = expanded.partition("/")[0]
        raise ConfigError([f"{value}: there is no user {user[1:]}; write the path without ~."])
    return str(Path(expanded).absolute())


def taken_for_files(tree: object, config_name: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value) for each value of a stored `tree` that was no file where the run
    began, and names one in this working directory. Names of our own prompt files are left out
    (`own_prompt_files`)."""
    typed = typed_paths(config_name)
    for path, value, _ in absolute_paths(tree, config_name):
        if typed.get(path) == "own":
            continue  # a directory that is written, which older runs stored as it was typed
        if not value.startswith(_MARKS) and value not in prompts.builtin_files():
            yield path, value


def own_prompt_files(tree: object, config_name: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, path) for each name of one of our own prompt files in a stored `tree`
    that this working directory holds as well. The run meant ours."""
    for path, value, _ in absolute_paths(tree, config_name):
        if value in prompts.builtin_files():
            yield path, str(prompts.DIRECTORY / value)


@functools.cache
def typed_paths(config_name: str) -> dict[str, str]:
    """Return the keys whose type is a path -> the kind of path."""
    keys = keys_of(schema_of(config_name)).items()
    # `resume` is read, and made absolute, before there is a tree.
    return {key: its.path for key, its in keys if its.path is not None and key != "resume"}


def _lies_in_one_of(path: str, components: Set[str]) -> bool:
    """Return whether `path` is below one of the `components`. "" is the whole tree.

    >>> _lies_in_one_of("reward.rewards[0].path", {"reward.rewards[0]"})
    True
    >>> _lies_in_one_of("reward.rewards", {"reward.rewards"})
    False
    """
    # By the beginnings of the path: a stored file may hold thousands of components.
    begins = (path[: cut.start()] for cut in re.finditer(r"[.\[]", path))
    return "" in components or any(begin in components for begin in begins)


def _of_component(name: str, path: str, value: str) -> str:
    if value.startswith(_MARKS):
        # `~name` of an unknown user stays as it is.
        return (
            absolute_path(value) if os.path.expanduser(value) != value or value[0] == "." else value
        )
    if os.path.isabs(value):
        return value
    if name in _PROMPTS or (name == "file" and any(f".{key}[" in path for key in _PROMPTS)):
        return _prompt_file(value)
    plain = str(Path(value))  # as whoever opens it: without a slash at the end
    named = name in NAMES and os.path.exists(plain)
    # A bare word stays a name, also where a file is called so.
    written = os.path.isfile(plain) and ("/" in plain or Path(plain).suffix != "")
    return absolute_path(value) if named or written else value


def _prompt_file(value: str) -> str:
    """Return the absolute path of a prompt file that exists. Any other value stays: the name of one
    of our own sets, or a text that names no file."""
    given = os.path.expanduser(value)
    # As whoever opens it: without a slash at the end.
    return absolute_path(given) if os.path.exists(str(Path(given))) else given


def why_unwritable(directory: Path) -> str | None:
    """Return why nothing can be written in `directory`, judged by its nearest existing ancestor;
    None if it can. Nothing is written."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return None
    return f"{existing} {'is no writable directory' if existing.is_dir() else 'is no directory'}"


def parts_of(path: str) -> Iterator[str | int]:
    """Yield the keys and indices of a dotted path, as `nodes` writes it."""
    for part in path.split("."):
        key, *indices = part.split("[")
        yield key
        yield from (int(index.rstrip("]")) for index in indices)


def node_at(tree: Any, parts: Iterable[str | int]) -> Any:
    """Return what lies in plain dicts and lists behind these keys and indices."""
    return functools.reduce(lambda node, part: node[part], parts, tree)


def lies_under(path: str, keys: Collection[str]) -> bool:
    """Return whether a dotted path is one of `keys`, or lies below one."""
    return any(path == key or path.startswith((f"{key}.", f"{key}[")) for key in keys)
