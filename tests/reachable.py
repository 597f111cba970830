"""Constructor arguments within reach of a configuration that end in a subprocess, an import, a path
that is written, or an address.

    python -m tests.reachable

Each line is `class argument: process|import|write|address`. The source of our own classes is
followed, without importing it. An argument marks the names and attributes to which it is assigned.
It also marks the methods of its class, and the functions of our packages that receive it. That is
too much rather than too little. Classes of Lightning and torch are listed by hand (`FOREIGN`).
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from typing import Any

from digenrl.config.arguments import _find_definition, _module_file, _parse_body
from digenrl.config.targets import known_components

FOREIGN: dict[str, dict[str, str]] = {
    "lightning.pytorch.Trainer": {
        "default_root_dir": "write",
        "model_registry": "address",
        "profiler": "write",
    },
    "lightning.pytorch.loggers.CSVLogger": dict.fromkeys(("save_dir", "name", "version"), "write"),
    "lightning.pytorch.loggers.TensorBoardLogger": dict.fromkeys(
        ("save_dir", "name", "version", "sub_dir", "kwargs"), "write"
    ),
    "torch.optim.Adam": {},
    "torch.optim.AdamW": {},
    "torch.optim.SGD": {},
}
"""Class of another package -> its arguments that reach further. `kwargs` go to a SummaryWriter."""
_OWN = ("digenrl", "reward_models")
_ALL, _FALSE = "*", ast.Constant(False)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class _Reached:
    """Finds the sinks that a parameter of one function or class reaches."""

    def __init__(self) -> None:
        self._open: set[tuple[str, str, str]] = set()
        self._found: dict[tuple[str, str, str], set[str]] = {}
        self._before: dict[tuple[str, str, str], set[str]] = {}
        """What the round before has found: the answer where calls go in a circle."""

    def again(self) -> bool:
        """Begin another round; return whether the last one has found more than the one before."""
        more = self._found != self._before
        self._before, self._found = self._found, {}
        return more

    def of_class(self, module: str, name: str, parameter: str) -> set[str]:
        """Return the kinds of sinks that a constructor's argument reaches."""
        key = (module, name, parameter)
        if key in self._found or key in self._open:
            return self._found.get(key, self._before.get(key, set()))
        self._open.add(key)
        methods = list(_methods(module, name))
        attributes, kinds = set[str](), set[str]()
        handed = dict[str, set[str | int]]()
        fields = not any(method.name == "__init__" for _, method in methods)
        if fields:
            attributes.add(parameter)
        for _ in range(2):
            for home, method in methods:
                names = [one.arg for one in _arguments(method) if one.arg not in ("self", "cls")]
                begin = {parameter} if method.name == "__init__" else set[str]()
                for one in sorted(handed.get(method.name, ()), key=str):
                    is_index = isinstance(one, int) and one < len(names)
                    begin |= {names[one] if is_index else str(one)}  # type: ignore[index]
                    begin |= set(names) if one == _ALL else set()
                kinds |= self._body(home, method, begin, attributes, handed)
        self._open.discard(key)
        self._found[key] = kinds
        return kinds

    def of_function(self, module: str, function: _Function, parameter: str) -> set[str]:
        """Return the kinds of sinks that a function's argument reaches."""
        key = (module, function.name, parameter)
        if key in self._found or key in self._open:
            return self._found.get(key, self._before.get(key, set()))
        self._open.add(key)
        names = [argument.arg for argument in _arguments(function)]
        begin = set(names) if parameter == _ALL else {parameter}
        self._found[key] = self._body(module, function, begin, set(), {})
        self._open.discard(key)
        return self._found[key]

    def _body(
        self,
        module: str,
        function: _Function,
        marked: set[str],
        attributes: set[str],
        handed: dict[str, set[str | int]],
    ) -> set[str]:
        if not marked and _named(function)[1].isdisjoint(attributes):
            return set()

        def marks(node: ast.AST) -> bool:
            names, own = _named(node)
            return not (names.isdisjoint(marked) and own.isdisjoint(attributes))

        def assign(target: ast.AST) -> None:
            for each in ast.walk(target):
                if isinstance(each, ast.Name) and each.id not in ("self", "cls"):
                    marked.add(each.id)
                elif isinstance(each, ast.Attribute) and _text(each.value) == "self":
                    attributes.add(each.attr)

        assigning, calls = _nodes(function)
        before: tuple[int, int] | None = None
        while before != (before := (len(marked), len(attributes))):
            for node in assigning:
                if isinstance(node, ast.Assign) and marks(node.value):
                    [assign(target) for target in node.targets]
                elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
                    if node.value is not None and marks(node.value):
                        assign(node.target)
                elif isinstance(node, (ast.For, ast.comprehension)) and marks(node.iter):
                    assign(node.target)
                elif isinstance(node, ast.With):
                    for item in node.items:
                        if item.optional_vars is not None and marks(item.context_expr):
                            assign(item.optional_vars)
                elif isinstance(node, ast.Return) and node.value is not None and marks(node.value):
                    attributes.add(function.name)
        kinds = set[str]()
        for node in calls:
            kind, ends = _sink(node)
            if kind is not None and any(marks(each) for each in ends):
                kinds.add(kind)
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            if not any(marks(each) for each in given):
                continue
            if isinstance(node.func, ast.Attribute) and _text(node.func.value) in (
                "self",
                "cls",
                "super()",
            ):
                handed.setdefault(node.func.attr, set()).update(_hot(node, marks))
            kinds |= self._called(module, node, marks)
        return kinds

    def _called(self, module: str, call: ast.Call, marks: Any) -> set[str]:
        """Follow a call into a function or class of our own packages."""
        name = call.func.id if isinstance(call.func, ast.Name) else None
        if isinstance(call.func, ast.Call) and _text(call.func.func) == "partial":
            return set()
        if name == "partial" and call.args and isinstance(call.args[0], ast.Name):
            name, arguments = call.args[0].id, call.args[1:]
        else:
            arguments = call.args
        home, leaf = module, name
        if name is None and isinstance(call.func, ast.Attribute):
            base = call.func.value
            if not isinstance(base, ast.Name):
                return set()
            imported = _imports(module).get(base.id)
            if imported is None or imported.partition(".")[0] not in _OWN:
                return set()
            home, leaf = imported, call.func.attr
        elif name is not None:
            imported = _imports(module).get(name)
            if imported is not None:
                home, _, leaf = imported.rpartition(".")
        if leaf is None or home.partition(".")[0] not in _OWN:
            return set()
        found = _defined(home, leaf)
        if found is None:
            return set()
        constructor = (
            next((m for _, m in _methods(home, leaf) if m.name == "__init__"), None)
            if isinstance(found, ast.ClassDef)
            else found
        )
        names = [] if constructor is None else [one.arg for one in _arguments(constructor)]
        names = [one for one in names if one != "self"]
        hot = set[str]()
        for index, each in enumerate(arguments):
            if marks(each):
                hot.add(names[index] if index < len(names) else _ALL)
        for keyword in call.keywords:
            if marks(keyword.value):
                hot.add(keyword.arg or _ALL)
        reached = set[str]()
        for one in sorted(hot):
            if isinstance(found, ast.ClassDef):
                for each in names if one == _ALL else [one]:
                    reached |= self.of_class(home, leaf, each)
            else:
                reached |= self.of_function(home, found, one)
        return reached


def _sink(call: ast.Call) -> tuple[str | None, list[ast.expr]]:
    """Return the kind of sink that a call is, and the arguments of which it is one."""
    text = _text(call.func)
    leaf = text.rpartition(".")[2]
    words = {keyword.arg: keyword.value for keyword in call.keywords}
    on = [call.func.value] if isinstance(call.func, ast.Attribute) else []
    every = [*call.args, *words.values()]
    if text.startswith(("subprocess.", "os.exec", "os.spawn", "os.posix_spawn")) or text in (
        "os.system",
        "Popen",
    ):
        return "process", every
    if leaf in ("import_module", "__import__", "get_object", "set_attention_backend", "exec"):
        return "import", every
    if leaf == "open":
        modes = [_text(each) for each in [*call.args[1:], *call.args[-1:], *words.values()]]
        if text == "os.open":  # flags by name are unknown here, so they count
            writes = not any("O_RDONLY" in word for word in modes)
        else:
            quoted = [word for word in modes if word[0] in "'\"" and len(word) < 6]
            writes = any(set(word.strip("'\"")) & set("wax+") for word in quoted)
        return ("write" if writes else None), [*on, *call.args[:1]]
    if leaf in ("write_text", "write_bytes", "mkdir", "unlink", "symlink_to", "touch"):
        return "write", on
    if leaf in ("save_pretrained", "append_event", "rmtree", "makedirs"):
        return "write", call.args[:1]
    if leaf in ("save_file", "save") or text in ("os.replace", "os.rename"):
        return "write", call.args[:2]
    if leaf in ("URL", "urlopen", "create_connection", "open_connection", "getaddrinfo"):
        return "address", every
    hub = leaf in ("snapshot_download", "hf_hub_download", "from_pretrained")
    fetches = hub and _text(words.get("local_files_only", _FALSE)) != "True"
    return ("address" if fetches else None), call.args[:1]


def _hot(call: ast.Call, marks: Any) -> Iterator[str | int]:
    """Yield the positions and names of the arguments of `call` that are marked."""
    for index, each in enumerate(call.args):
        if marks(each):
            yield _ALL if isinstance(each, ast.Starred) else index
    for keyword in call.keywords:
        if marks(keyword.value):
            yield keyword.arg or _ALL


@functools.cache
def _text(node: ast.AST) -> str:
    return ast.unparse(node)


@functools.cache
def _nodes(function: _Function) -> tuple[list[ast.AST], list[ast.Call]]:
    """Return the nodes of a function that give a name a value, and its calls."""
    nodes = [each for statement in function.body for each in ast.walk(statement)]
    assigning = (
        *(ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr),
        *(ast.For, ast.comprehension, ast.With, ast.Return),
    )
    return (
        [each for each in nodes if isinstance(each, assigning)],
        [each for each in nodes if isinstance(each, ast.Call)],
    )


@functools.cache
def _named(node: ast.AST) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names in an expression, and the attributes of `self` and `cls` in it."""
    names, own = set[str](), set[str]()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            names.add(each.id)
        elif isinstance(each, ast.Attribute) and _text(each.value) in ("self", "cls"):
            own.add(each.attr)
    return frozenset(names), frozenset(own)


def _arguments(function: _Function) -> list[ast.arg]:
    found = function.args
    rest = [one for one in (found.vararg, found.kwarg) if one is not None]
    return [*found.posonlyargs, *found.args, *found.kwonlyargs, *rest]


@functools.cache
def _imports(module: str) -> dict[str, str]:
    """Return local name -> dotted name of everything that a module imports."""
    source = _module_file(module)
    if source is None:
        return {}
    found = dict[str, str]()
    for statement in _parse_body(source):
        for node in ast.walk(statement):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.asname or alias.name.partition(".")[0]] = alias.name
    return found


def _methods(module: str, name: str, depth: int = 0) -> Iterator[tuple[str, _Function]]:
    """Yield (module, method) of a class and of its own bases; the most derived comes first."""
    definition = _defined(module, name)
    if not isinstance(definition, ast.ClassDef) or depth > 5:
        return
    home = _home(module, name)
    seen = set[str]()
    for item in definition.body:
        if isinstance(item, _Function):
            seen.add(item.name)
            yield home, item
    for base in definition.bases:
        text = _text(base)
        imported = _imports(home).get(text.partition(".")[0], f"{home}.{text}")
        dotted = imported + text.removeprefix(text.partition(".")[0])
        if dotted.partition(".")[0] in _OWN:
            yield from _methods(*dotted.rpartition(".")[::2], depth + 1)


def _defined(module: str, name: str) -> ast.AST | None:
    """Return the definition of `name`, wherever `module` has it from."""
    found = _find_definition(module, name)
    return None if found is None else found[1]


def _home(module: str, name: str, depth: int = 0) -> str:
    """Return the module that defines `name`, wherever `module` has it from."""
    source = _module_file(module)
    if source is None or depth > 4:
        return module
    if any(
        isinstance(item, (ast.ClassDef, _Function)) and item.name == name
        for item in _parse_body(source)
    ):
        return module
    imported = _imports(module).get(name)
    return module if imported is None else _home(*imported.rpartition(".")[::2], depth + 1)


def constructor_arguments(target: str) -> list[str]:
    """Return the names that a component's constructor takes, those of its bases included where it
    hands them on."""
    module, _, name = target.rpartition(".")
    methods = [method for _, method in _methods(module, name) if method.name == "__init__"]
    if not methods:
        definition = _defined(module, name)
        assert isinstance(definition, ast.ClassDef), target
        return [
            item.target.id
            for item in definition.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        ]
    names = dict.fromkeys(argument.arg for method in methods for argument in _arguments(method))
    return [name for name in names if name not in ("self", "args", "kwargs")]


def named_in_source() -> set[str]:
    """Return the classes that our own code puts into a `_target_`, beside `components`."""
    package = _module_file("digenrl")
    assert package is not None
    found = set[str]()
    for file in package.parent.rglob("*.py"):
        if '"_target_"' not in (text := file.read_text(encoding="utf-8")):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Dict):
                found |= {
                    value.value
                    for key, value in zip(node.keys, node.values, strict=True)
                    if isinstance(key, ast.Constant)
                    and key.value == "_target_"
                    and isinstance(value, ast.Constant)
                    and isinstance(value.value, str)
                }
    return found


def reachable() -> list[str]:
    """Return a line for each class and argument that reaches a sink, with the sinks' kinds."""
    reached = _Reached()
    lines = list[str]()
    while reached.again() or not lines:
        lines = _lines(reached)
    return lines


def _lines(reached: _Reached) -> list[str]:
    lines = []
    for target in sorted(known_components() | named_in_source()):
        if target in FOREIGN:
            lines += [f"{target} {name}: {kind}" for name, kind in FOREIGN[target].items()]
            continue
        module, _, leaf = target.rpartition(".")
        for name in constructor_arguments(target):
            if kinds := reached.of_class(module, leaf, name):
                lines.append(f"{target} {name}: {', '.join(sorted(kinds))}")
    return lines


if __name__ == "__main__":
    print("\n".join(reachable()))
