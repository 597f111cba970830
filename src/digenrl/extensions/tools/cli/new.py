"""`digenrl new KIND NAME`: a reward, model, hardware profile or experiment of your own, with its
test.

    digenrl new reward brightness
    digenrl new hardware my_node out=somewhere

Writes into the working directory (or `out`): configs/KIND/NAME.yaml, test_NAME.py and, of rewards
and models, NAME.py. The skeleton runs as written, and no file is overwritten. The last line
on standard output is a command that uses it, from the directory that it was written into.
"""

from __future__ import annotations

import importlib.util
import keyword
import sys
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from pydantic import Field

from digenrl.config import config_directory, group_options
from digenrl.config.errors import nearest_name
from digenrl.config.help import Arguments, Folder, own_command

SKELETONS = Path(__file__).with_name("skeletons")
KINDS = {
    "experiment": "digenrl train --config-dir {configs} experiment={name}",
    "hardware": "digenrl plan --config-dir {configs} experiment=sd35_flowgrpo hardware={name}",
    "model": (
        "digenrl train --config-dir {configs} experiment=sd35_flowgrpo hardware=cpu_tiny "
        "model={name} 'allow_targets=[{name}]' max_rl_steps=1"
    ),
    "reward": (
        "digenrl train --config-dir {configs} reward={name} 'allow_targets=[{name}]' max_rl_steps=2"
    ),
}
"""Kind -> the command that uses one, from the directory that it was written into."""


class NewKeys(Arguments):
    """What the command line asks for."""

    kind: str = Field(description=" | ".join(KINDS))
    name: str
    """Name in lower-case letters, digits and _, beginning with a letter."""
    out: Folder = Path()
    """Directory to write to."""


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0; 2 when kind, name or directory do not fit."""
    keys = ("kind", "name")
    bare = [word for word in arguments if "=" not in word and not word.startswith("-")]
    words = [f"{key}={word}" for key, word in zip(keys, bare, strict=False)] + [*bare[len(keys) :]]
    words += [word for word in arguments if word not in bare]

    def run_request(request: NewKeys, _: list[str]) -> None:
        for path in write_skeletons(request):
            print(path, file=sys.stderr)
        print(KINDS[request.kind].format(name=request.name, configs="configs"))

    return own_command(NewKeys, __doc__, words, run_request)


def write_skeletons(request: NewKeys) -> list[Path]:
    """Writes the files; returns their paths.

    Raises:
        ValueError: no such kind, a name that cannot be one or that is taken.
        FileExistsError: one of the files is there.
    """
    kind, name = request.kind, request.name
    if kind not in KINDS:
        close = nearest_name(kind, KINDS)
        raise ValueError(
            f"kind = {kind}: there is none; "
            + (f"nearest: {close}." if close else f"use {', '.join(KINDS)}.")
        )
    if not (name.isidentifier() and name.isascii() and name.islower()) or keyword.iskeyword(name):
        raise ValueError(
            f"name = {name}: becomes a module and a key; use small letters, digits and _, a letter "
            "first."
        )
    if (
        name in group_options(config_directory())[kind]
        or importlib.util.find_spec(name) is not None
    ):
        raise ValueError(
            f"name = {name}: there is a {kind} or a Python module of that name already; choose "
            "another."
        )
    title = "".join(part.capitalize() for part in name.split("_"))
    skeletons = {
        request.out
        / str(path.relative_to(SKELETONS / kind)).replace("NAME", name).removesuffix(".j2"): path
        for path in sorted((SKELETONS / kind).rglob("*.j2"))
    }
    if there := [str(path) for path in skeletons if path.exists()]:
        raise FileExistsError(f"{', '.join(there)}: exists; choose another name, or out=DIRECTORY.")
    engine = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    for path, skeleton in skeletons.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            engine.from_string(skeleton.read_text(encoding="utf-8")).render(name=name, title=title)
        )
    return list(skeletons)
