"""A schema read aloud: what each key may hold in a phrase, and pydantic's errors as messages in our words."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from digenrl.record.redact import redact_text

ANY_NAME = "NAME"
"""Stands for the names that a user chooses, as in `hardware.pools.NAME.count`."""
_COMPLAINTS = {
    "greater_than": "is too small",
    "greater_than_equal": "is too small",
    "less_than": "is too large",
    "less_than_equal": "is too large",
    "finite_number": "is not finite",
    "string_pattern_mismatch": "is empty",
}


@dataclass(frozen=True)
class Key:
    """What a schema says about one key."""

    allowed: str
    meaning: str
    required: bool
    """Every configuration holds it."""
    default: Any = None


@functools.cache
def keys_of(schema: type[BaseModel]) -> Mapping[str, Key]:
    """Dotted key -> what it may hold, for every leaf of a schema, in its order."""
    root = schema.model_json_schema(by_alias=True)
    return dict(_leaves(root, root.get("$defs", {}), "", True))


def _leaves(node: Mapping[str, Any], groups: Mapping[str, Any], path: str, required: bool) -> Iterator[tuple[str, Key]]:
    for name, entry in node["properties"].items():
        key = f"{path}.{name}" if path else name
        needed = required and name in node.get("required", ())
        variants = entry.get("anyOf", [entry])
        inner = next((groups[_name(variant)] for variant in variants if "$ref" in variant), None)
        named = entry.get("additionalProperties", None)
        if inner is not None:
            yield from _leaves(inner, groups, key, needed)
            continue
        if isinstance(named, Mapping) and "$ref" in named:
            yield from _leaves(groups[_name(named)], groups, f"{key}.{ANY_NAME}", False)
        else:
            yield key, Key(_phrase(entry), entry.get("description", ""), needed, entry.get("default"))


def _name(reference: Mapping[str, str]) -> str:
    return reference["$ref"].rpartition("/")[2]


def _phrase(node: Mapping[str, Any], between: str = " | ") -> str:
    """The values that a node of a JSON schema allows, in words."""
    if "phrase" in node:
        return str(node["phrase"])
    if "anyOf" in node:
        return " or ".join(_phrase(variant, " or ") for variant in node["anyOf"])
    if "const" in node or "enum" in node:
        return between.join(node.get("enum", [node.get("const")]))
    kind = node.get("type")
    if kind == "array":
        return f"list of ({_phrase(node['items'])})"
    if kind in ("integer", "number"):
        words = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
        limits = [f"{sign} {_number(node[word])}" for word, sign in words.items() if word in node]
        return " ".join(["whole number" if kind == "integer" else "number", " and ".join(limits)]).strip()
    return {"boolean": "true or false", "null": "null", "string": "text"}.get(str(kind), "a group of keys")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def kind_of(value: Any) -> str:
    """What sort of value it is, in words."""
    if value is None:
        return "null"
    if isinstance(value, (bool, str, Mapping, list)):
        names = {bool: "true/false", str: "text", list: "a list"}
        return names.get(type(value), "a group of keys")
    return "a whole number" if isinstance(value, int) else "a number"


def shown(value: Any) -> str:
    """A value as YAML writes it, cut, without secrets."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return redact_text(text if len(text) <= 200 else f"{text[:200]}...")


def problems_by_key(
    schema: type[BaseModel], tree: Any, unknown: Callable[[str, Any], str], strict: bool | None = None
) -> dict[str, str]:
    """Key -> message for everything in `tree` that the schema does not allow.

    Args:
        unknown: the message for a key that does not exist, from the key and its value.
        strict: False reads numbers and flags from text too.
    """
    try:
        schema.model_validate(tree, strict=strict)
    except ValidationError as error:
        found: dict[str, list[tuple[bool, Mapping[str, Any]]]] = {}
        for one in error.errors(include_url=False):
            key, in_item = _key_of(schema, one["loc"])
            found.setdefault(key, []).append((in_item, dict(one)))
        return {key: _message(schema, tree, key, errors, unknown) for key, errors in found.items()}
    return {}


def _key_of(schema: type[BaseModel], where: Sequence[int | str]) -> tuple[str, bool]:
    """The key of an error, and whether it lies in an item of the key's list."""
    leaves = {tuple(key.split(".")) for key in keys_of(schema)}
    for length in range(1, len(where) + 1):
        path = tuple(map(str, where[:length]))
        if any(_matches(leaf, path) for leaf in leaves):
            return ".".join(path), any(isinstance(part, int) for part in where[length:])
    return ".".join(map(str, where)), False


def _matches(leaf: tuple[str, ...], path: tuple[str, ...]) -> bool:
    return len(leaf) == len(path) and all(a in (b, ANY_NAME) for a, b in zip(leaf, path, strict=True))


def allowed(schema: type[BaseModel], key: str) -> tuple[str, str]:
    """What a key may hold, in a phrase (of a group: its keys), and its meaning."""
    path = tuple(key.split("."))
    inside = {}
    for leaf, its in keys_of(schema).items():
        parts = tuple(leaf.split("."))
        if _matches(parts, path):
            return its.allowed, its.meaning
        if _matches(parts[: len(path)], path):
            inside[parts[len(path)]] = its
    return "groups of keys by name" if ANY_NAME in inside else f"the keys {', '.join(sorted(inside))}", ""


def _message(
    schema: type[BaseModel],
    tree: Any,
    key: str,
    errors: Sequence[tuple[bool, Mapping[str, Any]]],
    unknown: Callable[[str, Any], str],
) -> str:
    in_item, error = min(errors, key=_distance)
    if error["type"] == "extra_forbidden":
        return unknown(key, error["input"])
    may, meaning = allowed(schema, key)
    if error["type"] == "missing":
        return f"{key}: missing; allowed: {may}{f' ({meaning})' if meaning else ''}."
    if may.startswith(("the keys ", "groups of keys")):
        return f"{key} = {shown(error['input'])}: must hold {may}."
    wrong = _complaint(error)
    if in_item:
        wrong = f"holds {error['input']!r}, which {wrong}"
    value = tree
    for part in key.split("."):
        value = value[part]
    return f"{key} = {shown(value)}: {wrong}; allowed: {may}."


def _distance(located: tuple[bool, Mapping[str, Any]]) -> int:
    """Of the types that a key may have, the one nearest to the value speaks: the right type first, a word last."""
    kind = located[1]["type"]
    return 2 if kind == "literal_error" else int(kind.endswith("_type"))


def _complaint(error: Mapping[str, Any]) -> str:
    kind, value = error["type"], error["input"]
    if kind in _COMPLAINTS:
        return _COMPLAINTS[kind]
    if kind == "too_short":
        return f"has {len(value)} items"
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if isinstance(value, float) and not math.isfinite(value):
        return "is not finite"
    if isinstance(value, float) and kind in ("int_type", "int_from_float"):
        return "is not a whole number"
    return "is none of the choices" if kind == "literal_error" and isinstance(value, str) else f"is {kind_of(value)}"
