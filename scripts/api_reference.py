"""docs/api.md, from the docstrings of what users call and implement (`make docs`); nothing is
imported for it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
_INTRODUCTION = """\
# From Python

Made from the docstrings by `make docs`. What stands first is in the package itself (`import digenrl`, which imports
neither torch nor numpy); the rest is imported from the module named. [quickstart.md](quickstart.md) has an example that
runs; the notebooks (`notebooks/`) have more. Methods that the engine alone calls, and no family overrides, are left
out.
"""  # noqa: E501
CONTENTS = {
    "digenrl": (
        "digenrl/api/workbench.py",
        ("load_run", "sample", "score", "plan", "rl_loop"),
    ),
    "What they return: `digenrl.api.workbench`": (
        "digenrl/api/workbench.py",
        ("LoadedRun", "Scored"),
    ),
    "RL steps in this process: `digenrl.api.loop`": (
        "digenrl/api/loop.py",
        ("Loop",),
    ),
    "Pictures of an evaluation: `digenrl.report.pictures`": (
        "digenrl/report/pictures.py",
        ("Samples",),
    ),
    "Prompts: `digenrl.types`, `digenrl.data`": ("digenrl/prompts/__init__.py", ("Prompt",)),
    "A reward implements: `digenrl.rewards.protocol`": (
        "digenrl/rewards/protocol.py",
        ("Scorer", "as_frames", "source_images"),
    ),
    "A model implements: `digenrl.models.policy`": ("digenrl/models/policy.py", ("Policy",)),
    "... its codec: `digenrl.models.codec`": ("digenrl/models/codec.py", ("Codec",)),
    "... its adapter: `digenrl.models.adapter`": ("digenrl/models/adapter.py", ("Adapter",)),
    "... of diffusers: `digenrl.models.pipeline`": (
        "digenrl/models/pipeline.py",
        ("DiffusersPolicy",),
    ),
    "... their codecs: `digenrl.models.pipeline_codec`": (
        "digenrl/models/pipeline_codec.py",
        ("DiffusersCodec",),
    ),
    "A loss implements: `digenrl.algorithms.surrogates`": (
        "digenrl/algorithms/surrogates.py",
        ("Surrogate", "Cells"),
    ),
}
"""Heading -> (file, names in it), in the order of the page."""
ENGINE_ONLY = {
    "Adapter": (
        "linear_sizes",
        "start_from",
        "refer_to_start",
        "sample_with",
        "load_trained_parameters",
        "only_generate",
        "generating_parameters",
    ),
    "DiffusersPolicy": ("attention_used", "keep_padding"),
}
"""Class -> methods that are left out: the engine alone calls them, and no family overrides them."""
Documented = ast.FunctionDef | ast.ClassDef


def page() -> str:
    """The whole document, in Markdown."""
    parts = [_INTRODUCTION]
    for heading, (file, names) in CONTENTS.items():
        parts.append(f"## {heading}\n")
        module = ast.parse((SOURCE / file).read_text())
        found = {node.name: node for node in module.body if isinstance(node, Documented)}
        for name in names:
            parts += _entry(found[name], ast.get_docstring(module))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts))


def _entry(node: Documented, module: str | None) -> Iterator[str]:
    """A function, or a class with its fields and methods: of one that is to be derived from, the
    abstract ones."""
    said = ast.get_docstring(node) or ""
    yield f"### `{node.name}`\n"
    if isinstance(node, ast.FunctionDef):
        yield f"```python\n{_signature(node)}\n```\n"
        yield _text(said)
        return
    yield _text(module if said.startswith("See the module") else said)
    yield from _fields(node)
    methods = [
        each for each in node.body if isinstance(each, ast.FunctionDef) and ast.get_docstring(each)
    ]
    kinds = {
        each.name: {ast.unparse(decorator) for decorator in each.decorator_list} for each in methods
    }
    wanted = [each for each in methods if "abstractmethod" in kinds[each.name]] or methods
    own = ENGINE_ONLY.get(node.name, ())
    if unknown := set(own) - set(kinds):
        raise ValueError(f"ENGINE_ONLY: {node.name} has no {sorted(unknown)}.")
    wanted = [each for each in wanted if each.name not in own]
    for method in (each for each in wanted if not each.name.startswith("_")):
        value = {"property", "cached_property"} & kinds[method.name]
        yield (
            f"**`.{method.name if value else _short(method)}`**: {_text(ast.get_docstring(method))}"
        )


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """A dataclass's fields, or a class's attributes, that have a docstring below them."""
    rows = []
    for field, below in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and not ast.unparse(field.target).startswith("_")
        ):
            rows.append(
                f"- `{ast.unparse(field.target)}`: {' '.join(str(below.value.value).split())}"
            )
    if rows:
        yield "\n".join(rows) + "\n"


def _signature(node: ast.FunctionDef) -> str:
    """Return a function's signature, with an argument per line if a single line would be too
    long."""
    flat = f"{node.name}({ast.unparse(node.args)})"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if len(flat + returns) <= 100:
        return flat + returns
    parts = re.split(r", (?=\*?\w+(?::|=|$)|\*,)", ast.unparse(node.args))
    return f"{node.name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"


def _short(node: ast.FunctionDef) -> str:
    names = [argument.arg for argument in node.args.args if argument.arg not in ("self", "cls")]
    return f"{node.name}({', '.join(names)})"


def _text(docstring: str | None) -> str:
    """Paragraphs, and the sections of a docstring as lists."""
    lines: list[str] = []
    inside = False
    for line in (docstring or "").splitlines():
        if re.fullmatch(r"(Args|Returns|Raises):", line):
            lines += ["", f"{line[:-1]}:", ""]
            inside = True
        elif inside and re.match(r" {4}\S", line):
            named = re.match(r" {4}([\w, .*]+): (.*)", line)
            lines.append(f"- `{named[1]}`: {named[2]}" if named else f"- {line.strip()}")
        else:
            lines.append(("  " if inside and line else "") + line.strip())
    return "\n".join(lines).replace("*L", "\\*L") + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
