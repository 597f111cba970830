"""Keys that repeat another key's value, such as `callbacks.evaluation.heldout_prompts`.

YAML files write a copy as an interpolation, `${data.heldout}`. A settled configuration and the
config.yaml of a run hold values. They also hold `copies`, copy -> source, by which a copy is a
reference again wherever its source may change: when a run is resumed, evaluated or planned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from digenrl.config.targets import has_key, walk_nodes

# ${key}, ${..key} relative to the node, ${oc.select:key,default}.
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?(?P<key>\.*[\w.\[\]-]+)(?:,[^{}]*)?\}")
_NOTHING = object()


def copies_of(tree: DictConfig, resolved: object) -> dict[str, str]:
    """Return copy -> source for each key of an unresolved tree that holds nothing but another key's
    value.

    >>> tree = OmegaConf.create({"a": 3, "b": {"c": "${a}", "d": "x ${a}"}})
    >>> copies_of(tree, resolved_plain(tree))
    {'b.c': 'a'}

    Args:
        resolved: the tree as dicts and lists, every reference resolved. Keys whose reference leads
            nowhere are absent.
    """
    found = {}
    for path, value in walk_nodes(OmegaConf.to_container(tree, resolve=False)):
        reference = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if reference is None:
            continue
        source = _from_root(path, reference["key"])
        # A key with dots in its name has no dotted path that leads back to it.
        if has_key(resolved, path) and has_key(resolved, source):
            found[path] = source
    return found


def _value_at(tree: DictConfig, key: str) -> object:
    try:
        return OmegaConf.select(tree, key, default=_NOTHING)
    except OmegaConfBaseException:  # said when the tree is resolved
        return _NOTHING


def link_copies(tree: DictConfig, copies: Mapping[str, object] | None = None) -> None:
    """Make every copy in `tree` a reference to its source, in place, where both hold one value.

    Args:
        copies: copy -> source; None: those that the tree holds.
    """
    named = copies if copies is not None else tree.get("copies")
    for copy, source in named.items() if isinstance(named, Mapping) else ():
        if not (isinstance(copy, str) and isinstance(source, str)):
            continue  # the schema refuses it, as it refuses `copies` that are no mapping
        values = [_value_at(tree, key) for key in (copy, source)]
        # Values that differ: the copy was set by itself, and is a copy no longer.
        if _NOTHING not in values and values[0] == values[1]:
            OmegaConf.update(tree, copy, f"${{{source}}}", merge=False)


def resolved_plain(tree: DictConfig) -> dict[str, object]:
    """Return a tree as dicts and lists, every reference resolved."""
    found: Any = OmegaConf.to_container(tree, resolve=True)
    return dict(found)


def _from_root(path: str, key: str) -> str:
    """Return a reference's key from the root. A leading dot means the node around `path`."""
    dots = len(key) - len(key.lstrip("."))
    if not dots:
        return key
    # One dot is the node around the key, two dots the node around that.
    around = re.split(r"\.|(?=\[)", path)[:-dots]
    return ".".join([*around, key.lstrip(".")]).replace(".[", "[")
