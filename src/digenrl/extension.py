"""How the core reaches an extension: by a dotted name, at the moment a run asks for what the
extension gives.

The core never imports `digenrl.extensions` (tests/test_layers.py), so that each folder there can be
deleted.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from typing import Any

_FOLDER = "digenrl.extensions"


class ExtensionMissing(ValueError):
    """A configuration asks for an extension that this installation lacks."""


def installed(name: str) -> bool:
    """Return whether the folder of extension `name` ("links", "planner", ...) is there. Imports
    nothing of it."""
    return _exists(f"{_FOLDER}.{name}")


def extension(target: str, wanted: str, instead: str) -> Any:
    """Return the attribute that `target` names in full:
    "digenrl.extensions.links.broadcast.BroadcastLink".

    Args:
        wanted: the setting that needs the extension, for the error: "network.publication =
            broadcast".
        instead: what a run without the extension does about it: "use network.publication=stream".

    Raises:
        ExtensionMissing: the folder of the extension is not there.
    """
    module, attribute = target.rsplit(".", 1)
    folder = ".".join(target.split(".")[:3])
    if not folder.startswith(f"{_FOLDER}."):
        raise ValueError(f"{target}: an extension lies in {_FOLDER}; import anything else.")
    if not _exists(folder):
        raise ExtensionMissing(
            f"{wanted}: needs {folder}, which this installation lacks; {instead}."
        )
    return getattr(importlib.import_module(module), attribute)


def offered(name: str) -> Iterator[Any]:
    """Yield the attribute `name` of each installed extension that has one.

    Args:
        name: COMMANDS, COMPONENTS and TARGET_RULES (`config.targets`), RULES (`config.relations`),
            or NOTES (`settle`).
    """
    if not _exists(_FOLDER):
        return
    for found in pkgutil.iter_modules(importlib.import_module(_FOLDER).__path__, f"{_FOLDER}."):
        if hasattr(module := importlib.import_module(found.name), name):
            yield getattr(module, name)


def _exists(folder: str) -> bool:
    """Return whether `folder` has an `__init__.py`: a deleted one can leave a directory of stale
    bytecode behind."""
    try:
        spec = importlib.util.find_spec(folder)
    except ModuleNotFoundError:  # digenrl.extensions itself was deleted
        return False
    return spec is not None and spec.origin is not None
