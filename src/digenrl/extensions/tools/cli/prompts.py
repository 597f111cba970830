"""`digenrl prompts NAME`: use a prompt set that others have published.

    digenrl prompts name=pickscore [folder=DIR]

Says where the files are published and compares yours with them. The last line of standard output
is the settings that train on them. Nothing is downloaded. Each set has a folder of its name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from digenrl.config.errors import nearest
from digenrl.config.help import Arguments, Folder, own_command
from digenrl.extensions.tools.published import SETS, check


class PromptsKeys(Arguments):
    """What the command line asks for."""

    name: str = Field(description=" | ".join(SETS))
    folder: Folder = Path("prompts")
    """Directory that holds one folder per prompt set."""


def main(words: Sequence[str]) -> int:
    """Exit code: 0; 2 when there is no such set, or its files are not here or not the published
    ones."""
    first = [f"name={words[0]}", *words[1:]] if words and words[0].isidentifier() else list(words)
    return own_command(PromptsKeys, __doc__, first, _show)


def _show(request: PromptsKeys, _: list[str]) -> None:
    if request.name not in SETS:
        close = nearest(request.name, SETS)
        hint = f"nearest: {close}." if close else f"there are {', '.join(SETS)}."
        raise ValueError(f"name = {request.name}: no such set; {hint}")
    *about, settings = check(SETS[request.name], request.folder / request.name)
    print("\n".join(about), file=sys.stderr)
    print(settings)
