"""What the class that `_target_` names takes, read from its source: nothing is imported."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from digenrl.config.errors import listing, nearest
from digenrl.config.removed import reason

_READ = ("digenrl", "reward_models", "lightning")
"""Packages whose source is read."""
_HYDRA_KEYS = ("_target_", "_partial_", "_recursive_", "_convert_", "_args_")
_Definition = ast.ClassDef | ast.FunctionDef


def argument_problems(where: str, path: str, target: str, node: Mapping[str, Any]) -> list[str]:
    """Return what is wrong between an admitted target and the arguments of its node.

    Args:
        where: dotted path of the `_target_`, for messages.
        path: dotted path of the node.
    """
    if target.partition(".")[0] not in _READ:
        return []
    module, name = target.rpartition(".")[::2]
    source = _module_file(module)
    if source is None:
        parent, child = module.rpartition(".")[::2]
        close = nearest(child, _submodules(parent))
        hint = f"; nearest: {parent}.{close}" if close else ""
        return [f"{where} = {target}: there is no module {module}{hint}."]
    definition = _find(module, name)
    if definition is None:
        known = _names(source)
        close = nearest(name, known)
        hint = f"nearest: {module}.{close}" if close else f"it has {listing(known)}"
        return [f"{where} = {target}: {module} defines no {name}; {hint}."]
    if isinstance(definition, ast.FunctionDef) and target.partition(".")[0] != "lightning":
        return [f"{where} = {target}: {name} is a function; a component is a class."]
    accepted = _arguments(module, definition)
    if accepted is None:
        return []
    problems = []
    for key in node:
        if key not in accepted and key not in _HYDRA_KEYS:
            close = nearest(str(key), accepted)
            hint = f"nearest: {path}.{close}" if close else f"it takes {listing(accepted)}"
            if (why := reason(f"{path}.{key}", node[key])) is not None:
                hint = f"it was removed: {why}"
            problems.append(f"{path}.{key}: {name} takes no such argument; {hint}.")
    return problems


@functools.cache
def _package_directory(package: str) -> Path | None:
    """Return the directory of a top-level package. `find_spec` of a top-level name executes no code
    of the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _module_file(module: str) -> Path | None:
    parts = module.split(".")
    directory = _package_directory(parts[0])
    if directory is None:
        return None
    base = directory.joinpath(*parts[1:])
    candidates = (
        base / "__init__.py",
        base.with_suffix(".py") if len(parts) > 1 else base / "__init__.py",
    )
    return next((file for file in candidates if file.is_file()), None)


def _submodules(module: str) -> list[str]:
    if not module or (directory := _package_directory(module.partition(".")[0])) is None:
        return []
    folder = directory.joinpath(*module.split(".")[1:])
    return (
        [file.stem for file in folder.glob("*.py") if file.stem != "__init__"]
        if folder.is_dir()
        else []
    )


@functools.cache
def _body(source: Path) -> tuple[ast.stmt, ...]:
    return tuple(ast.parse(source.read_text(encoding="utf-8")).body)


def _names(source: Path) -> list[str]:
    return [
        item.name
        for item in _body(source)
        if isinstance(item, _Definition) and not item.name.startswith("_")
    ]


def _find(module: str, name: str, depth: int = 0) -> _Definition | None:
    """Return the definition of `name` in `module`, following absolute imports from the same
    top-level package."""
    source = _module_file(module)
    if source is None or depth > 4:
        return None
    for item in _body(source):
        if isinstance(item, _Definition) and item.name == name:
            return item
        if isinstance(item, ast.ImportFrom) and item.module and not item.level:
            for alias in item.names:
                same = item.module.partition(".")[0] == module.partition(".")[0]
                if same and (alias.asname or alias.name) == name:
                    return _find(item.module, alias.name, depth + 1)
    return None


def _parameters(function: ast.FunctionDef, method: bool = False) -> tuple[str, ...] | None:
    """Return the names that a function takes; None = any, by **kwargs."""
    arguments = function.args
    if arguments.kwarg is not None:
        return None
    positional = [*arguments.posonlyargs, *arguments.args][1 if method else 0 :]
    return tuple(argument.arg for argument in (*positional, *arguments.kwonlyargs))


def _arguments(module: str, definition: _Definition, depth: int = 0) -> tuple[str, ...] | None:
    """Return the names that the constructor (or function) accepts; None = not knowable from its
    source."""
    if isinstance(definition, ast.FunctionDef):
        return _parameters(definition)
    for item in definition.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return _parameters(item, method=True)
    if depth > 4:
        return None
    inherited: list[str] = []
    for base in definition.bases:
        found = _find(module, base.id) if isinstance(base, ast.Name) else None
        if found is not None:
            names = _arguments(module, found, depth + 1)
            if names is None:
                return None
            inherited += names
        elif not (isinstance(base, ast.Name) and base.id in ("object", "Protocol", "ABC")):
            return None
    if any("dataclass" in ast.unparse(decorator) for decorator in definition.decorator_list):
        own = [
            item.target.id
            for item in definition.body
            if isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and not ast.unparse(item.annotation).startswith(("ClassVar", "typing.ClassVar"))
        ]
        return (*inherited, *own)
    return tuple(inherited) if definition.bases else ()
