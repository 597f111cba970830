"""The direction of imports (docs/design.md, section 3): a room sees only the rooms below it, and
there is no circle."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "digenrl"

MAY_IMPORT: dict[str, set[str]] = {
    "images": set(),
    "types": {"prompts"},
    "prompts": {"images"},
    "record": set(),
    "schedule": set(),
    "recompute": set(),
    "accelerator": set(),
    "facts": set(),
    "garbage": set(),
    "extras": set(),
    "hardware": set(),
    "config": {"prompts", "record", "images", "schedule", "facts", "rewards.needs"},
    "advisor": {"config"},
    "rounding": set(),
    "settle": {"advisor", "config", "hardware", "recompute", "rounding", "schedule"},
    "keys": set(),
    "diffusion": {"keys", "types"},
    "model_folder": set(),
    "models": {
        "extras",
        "accelerator",
        "types",
        "recompute",
        "images",
        "facts",
        "model_folder",
        "keys",
        "record.stored_yaml",
    },
    "algorithms": {"types", "diffusion", "models.policy", "rounding"},
    "rewards": {
        "extras",
        "accelerator",
        "types",
        "reward_models",
        "images",
        "cluster.signals",
        "model_folder",
    },
    "reward_models": {"extras", "types", "rewards", "model_folder", "images"},
    "reward_command": {"config", "rewards"},
    "rollout": {
        "keys",
        "types",
        "schedule",
        "diffusion",
        "models",
        "rewards",
        "images",
        "prompts",
    },
    "data": {"prompts", "schedule"},
    "report": {"extras", "record", "images"},
    "devices": {"accelerator", "cluster", "hardware", "config.settings"},
    "cluster": {"record", "schedule"},
    "transport": {"accelerator", "types", "schedule", "diffusion", "cluster", "record"},
    "strategy": {
        "accelerator",
        "types",
        "schedule",
        "facts",
        "models",
        "rollout",
        "data",
        "record",
        "cluster",
        "transport",
    },
    "earlier_run": {"config", "strategy"},
    "callbacks": {"types", "images", "data", "record", "rewards", "rollout", "report"},
    "parts": {
        "advisor",
        "algorithms",
        "callbacks",
        "cluster",
        "config",
        "hardware",
        "models",
        "prompts",
        "record",
        "rewards",
        "rollout",
        "schedule",
        "settle",
        "strategy",
        "transport",
        "types",
    },
    "prompt_encoding": {
        "accelerator",
        "callbacks",
        "config",
        "data",
        "models",
        "parts",
        "record",
        "types",
    },
    "run": {
        "accelerator",
        "advisor",
        "callbacks",
        "cluster",
        "config",
        "data",
        "devices",
        "models",
        "parts",
        "prompt_encoding",
        "record",
        "rewards",
        "rollout",
        "settle",
        "strategy",
        "types",
    },
    "launchers": {
        "extras",
        "accelerator",
        "advisor",
        "cluster",
        "config",
        "devices",
        "hardware",
        "parts",
        "record",
        "report",
        "rewards",
        "run",
        "schedule",
        "settle",
        "strategy",
    },
}
"""Room -> what it may import besides itself. The rooms of `TOP` may import everything."""

TOP = {"cli", "api", "__init__", "__main__", "extensions"}
"""Rooms that a user enters. `cli` chooses extensions, and no other room knows one."""

TYPES_ONLY: dict[str, set[str]] = {
    "diffusion": {"models.policy"},
    "advisor": {"models", "rewards", "transport"},
    "data": {"config.settings"},
    "hardware": {"config.settings"},
    "earlier_run": {"algorithms"},
    "run": {"algorithms"},
}
"""Room -> what it may name in annotations alone (under TYPE_CHECKING), where the import would point
upwards."""

STANDARD_LIBRARY_ONLY = ("schedule", "prompts", "recompute", "garbage")
TORCH_FREE = (
    "digenrl.schedule",
    "digenrl.record.spans",
    "digenrl.facts",
    "digenrl.recompute",
    "digenrl.advisor",
    "digenrl.settle",
    "digenrl.config",
    "digenrl.cli.sweeps",
    "digenrl.images",
    "digenrl.prompts",
    "digenrl.rewards.needs",
)


PICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
OBJECT_COLLECTIVES = {
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
}


def rooms() -> Iterator[tuple[str, Path]]:
    """(room, file) of every source file."""
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).with_suffix("").parts[0], path
    for path in sorted((ROOT / "reward_models").rglob("*.py")):
        yield "reward_models", path


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path, names: bool = False) -> tuple[tuple[str, bool, int], ...]:
    return tuple(_imports(path, names))


def _imports(path: Path, names: bool) -> Iterator[tuple[str, bool, int]]:
    """(absolute module, whether it is only for annotations, line) of every import in the file,
    nested ones included.

    `names`: `from a import b` gives `a.b` too, which may be a module.
    """
    tree = parsed(path)
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in for_types, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{path}:{node.lineno}: relative import; write the absolute name"
            )
            if node.module == "digenrl":
                for alias in node.names:
                    yield f"digenrl.{alias.name}", id(node) in for_types, node.lineno
            else:
                yield node.module or "", id(node) in for_types, node.lineno
                for alias in node.names if names else ():
                    yield f"{node.module}.{alias.name}", id(node) in for_types, node.lineno


def allowed(room: str, module: str, only_types: bool) -> bool:
    """Whether a file of `room` may import `module`."""
    inside = module.removeprefix("digenrl.")
    granted = MAY_IMPORT[room] | {room} | (TYPES_ONLY.get(room, set()) if only_types else set())
    return any(inside == name or inside.startswith(f"{name}.") for name in granted)


@pytest.mark.heavy
def test_imports_point_downwards() -> None:
    violations = [
        f"{path.relative_to(ROOT)}:{line}: {room} imports {module}"
        for room, path in rooms()
        if room in MAY_IMPORT
        for module, only_types, line in imports(path)
        if module.split(".")[0] in ("digenrl", "reward_models")
        and not allowed(room, module, only_types)
    ]
    assert not violations, "\n".join(violations)


NAMES_ONE = re.compile(r"digenrl\.extensions\.(\w+)")


def named_extensions(path: Path) -> Iterator[tuple[str, int]]:
    """Yield (extension, line) of every import and every text without line breaks that names a
    module of an extension. Docstrings have line breaks or are no arrows, and do not count."""
    tree = parsed(path)
    docstrings = {
        id(item.value)
        for node in ast.walk(tree)
        if isinstance(getattr(node, "body", None), list)
        for item in node.body
        if isinstance(item, ast.Expr)
    }
    for module, _, line in imports(path, names=True):
        if found := NAMES_ONE.match(module):
            yield found[1], line
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            pieces = [part.value for part in node.values if isinstance(part, ast.Constant)]
            text = "".join(map(str, pieces))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if id(node) not in docstrings and (found := NAMES_ONE.search(text)):
            yield found[1], node.lineno


def test_no_room_below_cli_names_an_extension() -> None:
    """I18: neither by an import nor by a string."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: names {extension}"
        for room, path in rooms()
        if room not in ("extensions", "cli")
        for extension, line in named_extensions(path)
    ]
    assert not found, "\n".join(found)
    assert {
        name for room, path in rooms() if room == "cli" for name, _ in named_extensions(path)
    } <= {"planner"}, (
        "cli chooses the planner; commands of other extensions are found by their folder"
    )


def test_a_name_in_a_string_is_an_arrow(tmp_path: Path) -> None:
    """Red where it must be: an import, a string, a formatted string; and not for a docstring."""
    file = tmp_path / "room.py"
    file.write_text(
        '"""See digenrl.extensions.planner.advice."""\n'
        "from digenrl.extensions.zoo import flux2\n"
        'A = "digenrl.extensions.bench.files.read"\n'
        'B = f"digenrl.extensions.export.{A}"\n'
    )
    assert sorted({name for name, _ in named_extensions(file)}) == ["bench", "export", "zoo"]


def arrows() -> dict[str, set[str]]:
    """Room -> rooms that it names, by imports (not those for annotations alone) and by strings.
    Each extension is a room."""
    found: dict[str, set[str]] = {}
    for room, path in rooms():
        here = room
        if room == "extensions" and path.parent != SOURCE / "extensions":
            here = f"extensions.{path.relative_to(SOURCE / 'extensions').parts[0]}"
        into = found.setdefault(here, set())
        for module, for_types, _ in imports(path, names=True):
            parts = module.split(".")
            if parts[0] == "digenrl" and len(parts) > 1 and not for_types:
                into.add(".".join(parts[1:3]) if parts[1] == "extensions" else parts[1])
        into |= {f"extensions.{name}" for name, _ in named_extensions(path)}
        into.discard(here)
    return {room: into & found.keys() for room, into in found.items()}


def test_rooms_make_no_circle() -> None:
    """Names in strings count as arrows."""
    graph = arrows()
    while ends := [room for room, into in graph.items() if not into]:
        for room in ends:
            del graph[room]
        graph = {room: into - {*ends} for room, into in graph.items()}
    assert not graph, f"these rooms lie on a circle, or above one: {graph}"


@pytest.mark.heavy
def test_extensions_do_not_know_each_other() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: imports {module}"
        for path in sorted((SOURCE / "extensions").rglob("*.py"))
        for module, _, line in imports(path, names=True)
        if module.startswith("digenrl.extensions.")
        and module.split(".")[2]
        != path.relative_to(SOURCE / "extensions").parts[0].removesuffix(".py")
    ]
    assert not found, "\n".join(found)


def test_every_room_has_a_rule() -> None:
    unknown = {room for room, _ in rooms()} - set(MAY_IMPORT) - TOP
    assert not unknown, f"say in MAY_IMPORT what {sorted(unknown)} may import"


def test_pure_rooms_use_the_standard_library_only() -> None:
    foreign = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for room, path in rooms()
        if room in STANDARD_LIBRARY_ONLY
        for module, _, line in imports(path)
        if module.split(".")[0] not in {*sys.stdlib_module_names, "digenrl"}
    ]
    assert not foreign, "\n".join(foreign)


def test_nothing_unpickles() -> None:
    """No pickle, no collective of Python objects, and torch.load only with weights_only=True
    (SECURITY.md)."""
    bad = []
    for _, path in rooms():
        tree = parsed(path)
        for module, _, line in imports(path):
            if module.split(".")[0] in PICKLING:
                bad.append(f"{path.relative_to(ROOT)}:{line}: imports {module}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in OBJECT_COLLECTIVES:
                bad.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.attr} pickles")
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                safe = [
                    key
                    for key in node.keywords
                    if key.arg == "weights_only" and ast.unparse(key.value) == "True"
                ]
                if not safe:
                    bad.append(
                        f"{path.relative_to(ROOT)}:{node.lineno}: torch.load without "
                        "weights_only=True"
                    )
            if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle"):
                bad += (
                    []
                    if ast.unparse(node.value) == "False"
                    else [f"{path.relative_to(ROOT)}: {node.arg}"]
                )
    assert not bad, "\n".join(bad)


def test_the_kind_of_device_is_asked_of_one_file() -> None:
    """`accelerator.py` knows kinds; the card of an export shows its reader a GPU."""
    named = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted(SOURCE.rglob("*"))
        if path.suffix in (".py", ".j2", ".yaml")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r'torch\.cuda|"cuda|== "nccl"|\.cuda\(|\.is_cuda', line)
    ]
    assert len(named) <= 12, "\n".join(named)
    assert len({line.split(":")[0] for line in named}) <= 2, "\n".join(named)


@pytest.mark.heavy
def test_functions_stay_short() -> None:
    """No function above 100 lines. (How long a file may be is for a reviewer to judge:
    CONTRIBUTING.md.)"""
    long = []
    for folder in ("src", "reward_models", "benchmarks", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(parsed(path)):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    length = (node.end_lineno or node.lineno) - node.lineno + 1
                    long += (
                        [f"{path.relative_to(ROOT)}: {node.name} has {length} lines"]
                        if length > 100
                        else []
                    )
    assert not long, "\n".join(long)


def test_importing_leaves_torch_out() -> None:
    """One process imports them one after the other: the first that brings torch is named."""
    code = (
        "import importlib, sys\n"
        f"for module in {TORCH_FREE}:\n"
        "    importlib.import_module(module)\n"
        "    for name in sorted({'torch', 'lightning', 'transformers'} & set(sys.modules)):\n"
        "        sys.exit(f'{module} imports {name}')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def module_graph() -> dict[str, set[str]]:
    """Module -> the modules that it imports, nested imports and those for annotations included.

    Left out: what TYPES_ONLY grants. A package counts as its `__init__.py` alone: that a
    submodule's import also runs the package is not an edge.
    """

    def name_of(path: Path) -> str:
        parts = (
            path.relative_to(SOURCE.parent if SOURCE in path.parents else ROOT)
            .with_suffix("")
            .parts
        )
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def granted(module: str, found: str) -> bool:
        room = module.removeprefix("digenrl.").split(".")[0]
        return found.removeprefix("digenrl.") in TYPES_ONLY.get(room, set())

    files = {name_of(path): path for _, path in rooms()}
    return {
        module: {
            found
            for found, only_types, _ in imports(path, names=True)
            if found in files and found != module and not (only_types and granted(module, found))
        }
        for module, path in files.items()
    }


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of nodes that reach one another (strongly connected components of more than one
    node)."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = list(graph[start])
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting += graph[node]
        return seen

    reach = {node: reached(node) for node in graph}
    found = {
        frozenset(other for other in reach[node] if node in reach[other])
        for node in graph
        if node in reach[node]
    }
    return sorted(sorted(circle) for circle in found)


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"f"}, "f": {"e"}}
    assert circles(graph) == [["a", "b", "c"], ["e", "f"]]
    graph["c"], graph["f"] = {"d"}, set()
    assert not circles(graph)


@pytest.mark.heavy
def test_there_is_no_circle_of_imports() -> None:
    found = circles(module_graph())
    assert not found, "these modules import one another:\n" + "\n".join(
        " <-> ".join(circle) for circle in found
    )


def test_what_lies_beside_the_sources_imports_modules_that_are_there() -> None:
    """A benchmark or a script is run by hand, perhaps months after a module has moved."""
    absent = []
    for folder in ("benchmarks", "scripts", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                if module.split(".")[0] in ("digenrl", "reward_models", "tests", "benchmarks"):
                    root = ROOT / "src" if module.startswith("digenrl") else ROOT
                    place = root.joinpath(*module.split("."))
                    if not (place.is_dir() or place.with_suffix(".py").is_file()):
                        absent.append(f"{path.relative_to(ROOT)}: {module}")
    assert absent == []
