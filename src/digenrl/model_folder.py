"""A model's folder is data: what its JSON files may not name.

diffusers and transformers read classes and kernels from the files of a folder. A pipeline's index
names the library of each component. A `config.json` may name an attention kernel, which
transformers fetches from the hub and runs if the package `kernels` is installed. Newer versions of
both libraries refuse more of this than older ones. The checks here hold with any version.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_INDICES = ("model_index.json", "modular_model_index.json")
_CONFIGS = re.compile(r"(.*_)?(config|index)\.json")
_NO_CONFIG = ("safetensors.index.json", "bin.index.json")
_LIBRARIES = ("diffusers", "transformers")
_IMPLEMENTATION = re.compile(r"_?(attn|attention|experts|kernel)_implementation(_internal)?")
_PLAIN = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
_LONGEST = 4 << 20
"""Most bytes of a file that is looked at. No configuration is as long."""


class CodeInFolder(ValueError):
    """A model's folder names code that is not installed."""


def require_data(folder: str | Path) -> None:
    """Check that no file of a model's folder names a library or a kernel to import.

    A name that is no folder on this machine is not looked at.

    Raises:
        CodeInFolder: names file, key and value.
    """
    root = Path(os.path.expanduser(folder))
    if not root.is_dir():
        return
    files = [*root.glob("*.json"), *root.glob("*/*.json")]
    own = [file for file in files if _CONFIGS.fullmatch(file.name)]
    own = [file for file in own if not file.name.endswith(_NO_CONFIG) and file.is_file()]
    facts = tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in sorted(own))
    _check_files(facts)


@functools.lru_cache(maxsize=256)
def _check_files(files: tuple[tuple[str, int, int], ...]) -> None:
    for name, _, size in files:
        file = Path(name)
        if size > _LONGEST:
            raise CodeInFolder(f"{file}: has {size} bytes; a model's configuration has fewer.")
        try:
            content = json.loads(file.read_bytes())
        except (ValueError, RecursionError, OSError):
            continue  # whoever reads it says so
        found = [
            *_named_kernels(content),
            *(_foreign_libraries(content) if file.name in _INDICES else ()),
        ]
        if file.name == "adapter_config.json" and isinstance(content, dict):
            found += [("base_model_name_or_path", content.get("base_model_name_or_path"))]
        for key, value in found:
            raise CodeInFolder(
                f"{file}: {key} = {value!a:.200}: names code or a model that is no part of this "
                "folder, and is refused; remove the entry if you trust the folder, and set "
                "model.attention_backend for another kernel."
            )


def _named_kernels(node: object) -> Iterator[tuple[str, object]]:
    """Yield every key that names an implementation which is not built into transformers."""
    if isinstance(node, dict):
        for key, value in node.items():
            if _IMPLEMENTATION.fullmatch(key):
                named = value.values() if isinstance(value, dict) else [value]
                if not all(_is_plain(each) for each in named):
                    yield key, value
            elif key in ("use_kernels", "kernel_config") and value:
                yield key, value
            else:
                yield from _named_kernels(value)
    elif isinstance(node, list):
        for value in node:
            yield from _named_kernels(value)


def _is_plain(value: object) -> bool:
    """Return whether an implementation is None, built in, or of an installed package. Without
    flash_attn, transformers fetches a kernel of the hub in its place."""
    installed = value == "flash_attention_2" and importlib.util.find_spec("flash_attn") is not None
    return value is None or value in _PLAIN or installed


def _foreign_libraries(index: object) -> Iterator[tuple[str, object]]:
    """Yield every component of a pipeline's index whose library is none of `_LIBRARIES`, nor a
    pipeline of diffusers."""
    if not isinstance(index, dict):
        return
    for key, value in index.items():
        if key.startswith("_"):
            if key == "_class_name" and not isinstance(value, str):
                yield key, value  # a file of the folder
            continue
        if not isinstance(value, list):
            continue
        named: list[Any] = [value[:1]]
        named += [item.get("type_hint") for item in value if isinstance(item, dict)]
        for each in named:
            library = each[0] if isinstance(each, list) and each else None
            if library is not None and not _is_library(library):
                yield key, value


def _is_library(name: object) -> bool:
    if not isinstance(name, str):
        return not isinstance(name, (list, dict))  # numbers of a list that names no component
    head = name.partition(".")[0]
    return head in _LIBRARIES or (name.isidentifier() and name in _pipeline_folders())


@functools.cache
def _pipeline_folders() -> frozenset[str]:
    """Return the names of the folders of diffusers.pipelines, which an index may name."""
    spec = importlib.util.find_spec("diffusers")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    folder = Path(next(iter(spec.submodule_search_locations))) / "pipelines"
    return frozenset(path.parent.name for path in folder.glob("*/__init__.py"))
