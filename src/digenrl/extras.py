"""The command that installs what an extra of pyproject.toml names. No index has digenrl itself."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path


def install_command(extra: str) -> str:
    """Return the command that installs an extra: of this checkout, else its packages by name."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e '{checkout}[{extra}]'"
    return "pip install " + " ".join(f"'{package}'" for package in packages_of(extra))


def packages_of(extra: str) -> list[str]:
    """Return the packages of an extra, those of extras that it names included."""
    found: list[str] = []
    for wanted in metadata.requires("digenrl") or ():
        package, _, marker = wanted.partition(";")
        if not re.search(rf"extra\s*==\s*['\"]{extra}['\"]", marker):
            continue
        inner = re.match(r"digenrl\[([\w,]+)\]", package)
        for name in inner[1].split(",") if inner else ():
            found += packages_of(name)
        found += [] if inner else [package.strip()]
    return found
