"""What the class that `_target_` names takes, read from its source: nothing is imported."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from digenrl.config.errors import list_names, nearest_name
from digenrl.config.removed import removal_reason
from digenrl.config.validation import kind_of, show_value
from digenrl.config.words import shell_word

_READ = ("digenrl", "reward_models", "lightning")
"""Packages whose source is read."""
_HYDRA_KEYS = ("_target_", "_partial_", "_recursive_", "_convert_", "_args_")
_Definition = ast.ClassDef | ast.FunctionDef


def argument_problems(where: str, path: str, target: str, node: Mapping[str, object]) -> list[str]:
    """Return what is wrong between an admitted target and the arguments of its node.

    Args:
        where: dotted path of the `_target_`, for messages.
        path: dotted path of the node.
    """
    # The user's own packages are not read: what they may hold is not known here.
    if target.partition(".")[0] not in _READ:
        return []
    module, name = target.rpartition(".")[::2]
    source = _module_file(module)
    if source is None:
        parent, child = module.rpartition(".")[::2]
        close = nearest_name(child, _list_submodules(parent))
        hint = f"; nearest: {parent}.{close}" if close else ""
        return [f"{where} = {target}: there is no module {module}{hint}."]
    found = _find_definition(module, name)
    if found is None:
        known = _public_names(source)
        close = nearest_name(name, known)
        hint = f"nearest: {module}.{close}" if close else f"it has {list_names(known)}"
        return [f"{where} = {target}: {module} defines no {name}; {hint}."]
    home, definition = found
    if isinstance(definition, ast.FunctionDef) and target.partition(".")[0] != "lightning":
        return [f"{where} = {target}: {name} is a function; a component is a class."]
    accepted = _accepted_arguments(home, definition)
    if accepted is None:
        return []
    problems = []
    for key in node:
        if key not in accepted and key not in _HYDRA_KEYS:
            close = nearest_name(str(key), accepted)
            hint = f"nearest: {path}.{close}" if close else f"it takes {list_names(accepted)}"
            if (why := removal_reason(f"{path}.{key}", node[key])) is not None:
                hint = f"it was removed: {why}"
            problems.append(f"{path}.{key}: {name} takes no such argument; {hint}.")
    # Values come after names, so that a misspelt key is said first.
    for key in accepted.keys() & node.keys():
        problems += _value_problems(f"{path}.{key}".lstrip("."), node[key], accepted[key])
    return problems


def _value_problems(key: str, held: object, annotation: ast.expr | None) -> Iterator[str]:
    """Yield what is wrong with a value that a constructor annotates."""
    kinds = _plain_kinds(annotation)
    if kinds is not None and not any(fits(held) for fits in kinds.values()):
        text = f" Write {shell_word(key, show_value(held))} if you mean the text."
        text *= "text" in kinds and isinstance(held, (bool, int, float))
        yield (
            f"{key} = {show_value(held)}: is {kind_of(held)}; allowed: {' or '.join(kinds)}.{text}"
        )
    union = _union_of(annotation)
    named = key.endswith("dtype") and "str" in union and isinstance(held, str)
    # A constructor that takes further names says so: dtype: str | Literal["auto"].
    if named and held not in DTYPES and f"Literal[{held!r}]" not in union:
        yield f"{key} = {show_value(held)}: is no dtype; allowed: {' | '.join(DTYPES)}."


def _union_of(annotation: ast.expr | None) -> list[str]:
    return [] if annotation is None else ast.unparse(annotation).split(" | ")


DTYPES = ("bfloat16", "float32", "float64", "float16")
"""torch has more names for these (half), which no check here would know."""
_PLAIN: dict[str, tuple[str, Callable[[object], bool]]] = {
    # A bool is an int in Python.
    "int": ("whole number", lambda held: isinstance(held, int) and not isinstance(held, bool)),
    "float": ("number", lambda held: isinstance(held, (int, float)) and not isinstance(held, bool)),
    "bool": ("true or false", lambda held: isinstance(held, bool)),
    "str": ("text", lambda held: isinstance(held, str)),
    "Path": ("text", lambda held: isinstance(held, str)),
    "None": ("null", lambda held: held is None),
}
"""Annotation -> what it is called, and whether a value of a YAML file fits."""


def _plain_kinds(annotation: ast.expr | None) -> dict[str, Callable[[object], bool]] | None:
    """Return the plain types that an annotation allows; None where it allows others, too.

    >>> list(_plain_kinds(ast.parse("int | None", mode="eval").body))
    ['whole number', 'null']
    >>> _plain_kinds(ast.parse("int | Sequence[int]", mode="eval").body) is None
    True
    """
    match annotation:
        case ast.Name(id=name) if name in _PLAIN:
            return dict([_PLAIN[name]])
        case ast.Constant(value=None):
            return dict([_PLAIN["None"]])
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            parts = [_plain_kinds(left), _plain_kinds(right)]
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            parts = [_plain_kinds(inner), dict([_PLAIN["None"]])]
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=elements)):
            parts = [_plain_kinds(each) for each in elements]
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            words = choices.elts if isinstance(choices, ast.Tuple) else [choices]
            allowed = [word.value for word in words if isinstance(word, ast.Constant)]
            return {" | ".join(map(str, allowed)): allowed.__contains__}
        case _:
            return None
    found: dict[str, Callable[[object], bool]] = {}
    # One part that is not plain makes the whole annotation unknown.
    for part in parts:
        if part is None:
            return None
        found |= part
    return found


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
    # No `find_spec` here: for a name with dots it would import the packages around it.
    base = directory.joinpath(*parts[1:])
    candidates = (
        base / "__init__.py",
        base.with_suffix(".py") if len(parts) > 1 else base / "__init__.py",
    )
    return next((file for file in candidates if file.is_file()), None)


def _list_submodules(module: str) -> list[str]:
    if not module or (directory := _package_directory(module.partition(".")[0])) is None:
        return []
    folder = directory.joinpath(*module.split(".")[1:])
    return (
        [file.stem for file in folder.glob("*.py") if file.stem != "__init__"]
        if folder.is_dir()
        else []
    )


@functools.cache
def _parse_body(source: Path) -> tuple[ast.stmt, ...]:
    return tuple(ast.parse(source.read_text(encoding="utf-8")).body)


def _public_names(source: Path) -> list[str]:
    return [
        item.name
        for item in _parse_body(source)
        if isinstance(item, _Definition) and not item.name.startswith("_")
    ]


def _find_definition(module: str, name: str, depth: int = 0) -> tuple[str, _Definition] | None:
    """Return the definition of `name` in `module`, following absolute imports from the same
    top-level package, and the module where it stands."""
    source = _module_file(module)
    # The depth ends imports that go in a circle.
    if source is None or depth > 4:
        return None
    for item in _parse_body(source):
        if isinstance(item, _Definition) and item.name == name:
            return module, item
        if isinstance(item, ast.ImportFrom) and item.module and not item.level:
            for alias in item.names:
                same = item.module.partition(".")[0] == module.partition(".")[0]
                if same and (alias.asname or alias.name) == name:
                    return _find_definition(item.module, alias.name, depth + 1)
    return None


_Arguments = dict[str, ast.expr | None]
"""Name -> annotation."""


def _parameters(function: ast.FunctionDef) -> _Arguments:
    """Return what a function takes, without what its **kwargs may hold."""
    arguments = function.args
    each = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return {argument.arg: argument.annotation for argument in each}


def _passes_on(function: ast.FunctionDef) -> bool:
    """Return whether a constructor hands its **kwargs to its base's constructor, and uses them
    nowhere else."""
    kwargs = function.args.kwarg
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    handed = [
        _count_uses(call, kwargs) for call in calls if ast.unparse(call.func) == "super().__init__"
    ]
    # Equal counts: every use of kwargs is an argument of super().__init__.
    return sum(handed) == _count_uses(function, kwargs) > 0


def _count_uses(node: ast.AST, name: ast.arg | None) -> int:
    """Return how often `node` reads the variable `name`."""
    read = (each.id for each in ast.walk(node) if isinstance(each, ast.Name))
    return 0 if name is None else list(read).count(name.arg)


def _accepted_arguments(module: str, definition: _Definition, depth: int = 0) -> _Arguments | None:
    """Return what the constructor (or function) accepts; None = not knowable from its source."""
    if isinstance(definition, ast.FunctionDef):
        return None if definition.args.kwarg else _parameters(definition)
    inherited: _Arguments = {}
    for item in definition.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            given = _parameters(item)
            given.pop(next(iter(given)))  # self
            # Without **kwargs this constructor alone decides, whatever its bases take.
            if item.args.kwarg is None:
                return given
            if not _passes_on(item):
                return None
            inherited |= given
    if depth > 4:
        return None
    for base in definition.bases:
        found = _find_definition(module, base.id) if isinstance(base, ast.Name) else None
        if found is not None:
            names = _accepted_arguments(*found, depth + 1)
            if names is None:
                return None
            inherited = names | inherited
        # A base that cannot be looked up may accept anything.
        elif not (isinstance(base, ast.Name) and base.id in ("object", "Protocol", "ABC")):
            return None
    # The constructor of a dataclass stands nowhere. Its fields are the arguments.
    if any("dataclass" in ast.unparse(decorator) for decorator in definition.decorator_list):
        own = {
            item.target.id: item.annotation
            for item in definition.body
            if isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and not ast.unparse(item.annotation).startswith(("ClassVar", "typing.ClassVar"))
        }
        return inherited | own
    return inherited if definition.bases else {}
