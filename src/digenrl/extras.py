"""The command that installs what an extra of pyproject.toml names. No index has digenrl itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path


@contextmanager
def named_in_errors(extra: str, user: str) -> Iterator[None]:
    """Import optional packages inside this context, so that an absent one names its extra.

    Example:
        with named_in_errors("video", "writing videos"):
            import imageio.v3 as imageio

    Args:
        user: what needs the packages, as the message begins.

    Raises:
        ImportError: a package of the extra is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"{user} needs packages that are not installed: {install_command(extra)} ({error})"
        ) from error


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
