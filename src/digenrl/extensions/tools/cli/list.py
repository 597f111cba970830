"""The options of every group, each with the first sentence of its file.

    digenrl list [GROUP] [--config-dir DIR]

Without a group: every group with the names of its options, none left out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from digenrl.config.compose import group_options, own_directories, with_search_path
from digenrl.config.errors import nearest_name
from digenrl.config.help import show_page, wants_help
from digenrl.config.help_pages import command_help
from digenrl.config.shipped import config_directory


def main(words: Sequence[str]) -> int:
    """Print the list. Returns exit code 2 when there is no such group."""
    if wants_help(words):
        show_page(command_help(__doc__))
        return 0
    given = with_search_path(words)
    directories = [config_directory(), *own_directories(given)]
    options = group_options(*directories)
    asked = [word.rstrip("=") for word in given if not word.startswith("hydra.")]
    unknown = [name for name in asked if name not in options]
    for name in unknown:
        close = nearest_name(name, options)
        hint = f"nearest: {close}" if close else f"groups: {', '.join(options)}"
        print(f"digenrl list {name}: no such group; {hint}.", file=sys.stderr)
    if unknown:
        return 2
    lines = [f"{group:<24}{', '.join(names)}" for group, names in options.items()]
    if asked:
        lines = [
            f"{group}={name:<26} {first_sentence(_option_file(directories, group, name))}"
            for group in asked
            for name in options[group]
        ]
    show_page("\n".join(lines))
    return 0


def _option_file(directories: Sequence[Path], group: str, name: str) -> Path:
    paths = (directory / group / f"{name}.yaml" for directory in directories)
    return next(path for path in paths if path.is_file())


def first_sentence(file: Path) -> str:
    """Return the first sentence of the comment at the head of a YAML file; "" without one."""
    head = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:
            head.append(line.lstrip("# "))
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", " ".join(head), maxsplit=1)[0]
