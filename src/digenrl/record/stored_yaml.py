"""YAML of a run directory as plain data: bounded, without aliases.

An alias lets a few bytes stand for millions of nodes, and lets two keys share one value. No run
writes one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from digenrl.record.small_file import read_text

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MOST_EVENTS, _DEEPEST = 50_000, 100
"""Most nodes of a file, and most levels."""


def checked_text(file: Path) -> str:
    """Return the text of a YAML file that holds no alias.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it is too long, or no UTF-8.
        yaml.YAMLError: it is no YAML, has an alias, or too many nodes or levels.
    """
    text = read_text(file)
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=_LOADER)):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(
                f"line {event.start_mark.line + 1} has an alias (*{event.anchor!a:.40}), which no "
                "run writes: write the value there"
            )
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST or number > _MOST_EVENTS:
            raise yaml.YAMLError(f"has more than {_DEEPEST} levels or {_MOST_EVENTS} nodes")
    return text


def read_plain(file: Path) -> object:
    """Return the content of a YAML file as plain data. Raises as `checked_text`."""
    plain: object = yaml.load(checked_text(file), _LOADER)
    return plain
