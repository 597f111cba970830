"""Version of the running code, which must be equal on all ranks of a run."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


@cache
def code_version() -> str:
    """Return the digest of this package's sources, with the versions of the computing libraries."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return (
        f"digenrl {digest.hexdigest()[:12]}, torch {version('torch')}, diffusers "
        f"{version('diffusers')}"
    )
