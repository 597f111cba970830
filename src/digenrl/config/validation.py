"""Schemas in words: the values that each key may hold as a phrase, and pydantic's errors as our
messages."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from digenrl.config.removed import removal_reason
from digenrl.config.words import shell_word
from digenrl.record.redact import redact_text

ANY_NAME = "NAME"
"""Placeholder for the names that a user chooses, as in `hardware.pools.NAME.count`."""
_COMPLAINTS = {
    "greater_than": "is too small",
    "greater_than_equal": "is too small",
    "less_than": "is too large",
    "less_than_equal": "is too large",
    "finite_number": "is not finite",
}


@dataclass(frozen=True)
class Key:
    """What a schema says about one key."""

    allowed: str
    meaning: str
    required: bool
    """Whether every configuration must hold the key."""
    default: Any = None
    path: str | None = None
    """Kind of the path that the key holds: own | prompts; None: the key holds no path."""


Tree = Mapping[str, "Key | Tree"]
"""Name -> what a schema says about the key, or the keys inside."""


@functools.cache
def _tree_of(schema: type[BaseModel]) -> Tree:
    # By the JSON schema, because pydantic has resolved aliases, unions and docstrings in it.
    root: Any = schema.model_json_schema()
    return _read_group(root, root.get("$defs", {}), True)


_LIMITS: Mapping[Literal["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"], str] = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
}
_Schema = TypedDict(
    "_Schema",
    {
        "$ref": str,
        "properties": "dict[str, _Schema]",
        "required": list[str],
        "additionalProperties": "_Schema | bool",
        "anyOf": "list[_Schema]",
        "items": "_Schema",
        "type": str,
        "const": str,
        "enum": list[str],
        "minimum": float,
        "exclusiveMinimum": float,
        "maximum": float,
        "exclusiveMaximum": float,
        "description": str,
        "default": object,
        "phrase": str,
        "path": str,
    },
    total=False,
)
"""A node of a JSON schema, as pydantic writes it; `phrase` and `path` are ours (`value_types`)."""


def _read_group(node: _Schema, groups: Mapping[str, _Schema], required: bool) -> Tree:
    """Return the keys of a group; `groups` are the named ones of a JSON schema."""
    found: dict[str, Key | Tree] = {}
    for name, entry in node["properties"].items():
        needed = required and name in node.get("required", ())
        # Groups under names of the user's choice, such as hardware.pools.NAME.
        named = entry.get("additionalProperties")
        # A group that may be null is an "anyOf" of the group and null.
        inner = next(
            (variant["$ref"] for variant in entry.get("anyOf", [entry]) if "$ref" in variant), None
        )
        if inner is not None:
            found[name] = _read_group(groups[inner.rpartition("/")[2]], groups, needed)
        elif isinstance(named, Mapping) and "$ref" in named:
            # One description serves all names.
            found[name] = {
                ANY_NAME: _read_group(groups[named["$ref"].rpartition("/")[2]], groups, False)
            }
        else:
            found[name] = Key(
                _allowed_phrase(entry),
                " ".join(entry.get("description", "").split()),
                needed,
                entry.get("default"),
                next(
                    (each["path"] for each in (entry, *entry.get("anyOf", ())) if "path" in each),
                    None,
                ),
            )
    return found


@functools.cache
def keys_of(schema: type[BaseModel]) -> Mapping[str, Key]:
    """Return dotted key -> what the key may hold, for every leaf of a schema, in its order."""
    return dict(_key_leaves(_tree_of(schema), ""))


def _key_leaves(tree: Tree, path: str) -> Iterator[tuple[str, Key]]:
    for name, node in tree.items():
        if isinstance(node, Key):
            yield path + name, node
        else:
            yield from _key_leaves(node, f"{path}{name}.")


def _allowed_phrase(node: _Schema, between: str = " | ") -> str:
    """Return the values that a node of a JSON schema allows, in words."""
    if "phrase" in node:
        return str(node["phrase"])
    if "anyOf" in node:
        return " or ".join(_allowed_phrase(variant, " or ") for variant in node["anyOf"])
    if "const" in node or "enum" in node:
        return between.join(node["enum"] if "enum" in node else [node["const"]])
    kind = node.get("type")
    if kind == "array":
        return f"list of ({_allowed_phrase(node['items'])})"
    # Limits are named as a user would write them: whole number >= 1.
    if kind in ("integer", "number"):
        limits = [
            f"{sign} {_number_text(node[word])}" for word, sign in _LIMITS.items() if word in node
        ]
        return " ".join(
            ["whole number" if kind == "integer" else "number", " and ".join(limits)]
        ).strip()
    return {"boolean": "true or false", "null": "null", "string": "text"}.get(
        str(kind), "a group of keys"
    )


def _number_text(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def kind_of(value: object) -> str:
    """Return the type of a value, in words."""
    if value is None:
        return "null"
    # bool before int, of which it is a subclass.
    if isinstance(value, (bool, str, Mapping, list)):
        names = {bool: "true/false", str: "text", list: "a list"}
        return names.get(type(value), "a group of keys")
    return "a whole number" if isinstance(value, int) else "a number"


def show_value(value: object) -> str:
    """Return a value as YAML writes it, cut, without secrets."""
    text = (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
    return redact_text(text if len(text) <= 200 else f"{text[:200]}...")


def problems_by_key(
    schema: type[BaseModel], tree: object, unknown: Callable[[str, object], str]
) -> dict[str, str]:
    """Return key -> message for everything in `tree` that the schema does not allow.

    Args:
        unknown: makes the message for a key that does not exist, from the key and its value.
    """
    try:
        schema.model_validate(tree)
    except ValidationError as error:
        found: dict[str, list[_Located]] = {}
        for one in error.errors():
            located = _locate_error(_tree_of(schema), one)
            found.setdefault(located.key, []).append(located)
        # A value that may have several types has an error for each of them.
        return {
            key: _error_message(tree, min(errors, key=_error_rank), unknown)
            for key, errors in found.items()
        }
    return {}


@dataclass(frozen=True)
class _Located:
    """A pydantic error, and the key with the error."""

    key: str
    said: Key | Tree | None
    """Description of the key in the schema; None: there is no such key."""
    in_item: bool
    """Whether the error is about an item of a list that the key holds."""
    error: ErrorDetails


def _locate_error(node: Key | Tree | None, error: ErrorDetails) -> _Located:
    path, where = list[str](), list(error["loc"])
    # Behind a leaf pydantic adds names of union members, which are no keys.
    while where and isinstance(node, Mapping):
        path.append(str(where.pop(0)))
        node = node.get(path[-1], node.get(ANY_NAME))
    return _Located(".".join(path), node, any(isinstance(part, int) for part in where), error)


def _error_message(tree: object, located: _Located, unknown: Callable[[str, object], str]) -> str:
    key, said, error = located.key, located.said, located.error
    if error["type"] == "extra_forbidden":
        return unknown(key, error["input"])
    if isinstance(said, Mapping):
        held = "groups by name" if ANY_NAME in said else f"the keys {', '.join(sorted(said))}"
        if error["type"] == "missing":
            return f"{key}: missing; it must hold {held}."
        return f"{key or 'the configuration'} = {show_value(error['input'])}: must hold {held}."
    assert said is not None
    if error["type"] == "missing":
        meaning = f" ({said.meaning.rstrip('.')})" if said.meaning else ""
        return f"{key}: missing; allowed: {said.allowed}{meaning}."
    # Times False, the text is empty.
    wrong = f"holds {error['input']!r}, which " * located.in_item + _complaint_text(error)
    value: Any = tree
    for part in key.split("."):
        value = value[part]
    if (allowed := said.allowed).startswith("a group of keys") and error["input"] is not value:
        key, value, allowed = ".".join(map(str, error["loc"])), error["input"], "a group of keys"
    # Also a value that was removed while its key stayed.
    if (why := removal_reason(key, value)) is not None:
        return f"{key} = {show_value(value)}: was removed; {why}."
    instead = _suggest_instead(key, value, allowed)
    return f"{key} = {show_value(value)}: {wrong}; allowed: {allowed}.{instead}"


def _suggest_instead(key: str, value: object, allowed: str) -> str:
    """Return what to write where a value of another type was meant."""
    if value is None and key.startswith(("callbacks.", "logger.", "reward.")):
        return f" Write ~{key} to leave it out."
    if isinstance(value, (bool, int, float)) and allowed.startswith(("name of", "text", "path of")):
        return f" Write {shell_word(key, show_value(value))} if you mean the text."
    return ""


def _error_rank(located: _Located) -> int:
    """Return the rank of an error among those of one key; the least is reported.

    A key may have several types. An error about the value's own type comes first, a wrong type
    next, a wrong word last.
    """
    kind = located.error["type"]
    if located.error["loc"][-1:] == ("[key]",):  # the name of a mapping's entry
        return 0
    return 2 if kind == "literal_error" else int(kind.endswith("_type"))


def _complaint_text(error: ErrorDetails) -> str:
    kind, value = error["type"], error["input"]
    if kind == "string_pattern_mismatch":
        return "is not of that form" if value.strip() else "is empty"
    if kind in _COMPLAINTS:
        return _COMPLAINTS[kind]
    if error["loc"][-1] == "[key]":
        return f"names {value}"
    if kind == "too_short":
        return f"has {len(value)} items"
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if isinstance(value, float) and not math.isfinite(value):
        return "is not finite"
    if isinstance(value, float) and kind in ("int_type", "int_from_float"):
        return "is not a whole number"
    if kind == "literal_error" and isinstance(value, str):
        return "is none of the choices"
    return f"is {kind_of(value)}"
