"""What is chosen because an extension is there: commands, the planner's advice, plans.

Everything below this room works without the folders of digenrl.extensions, and names none of them.
A configuration reaches an extension by a `_target_`, and a user by a command of `offered_commands`.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from digenrl.advisor import Advisor, PlainAdvisor

if TYPE_CHECKING:
    from digenrl.config.commands import Command

_FOLDER = "digenrl.extensions"
_PLANNER = "digenrl.extensions.planner"


class ExtensionMissing(ValueError):
    """A user asks for an extension that this installation lacks."""


def offered_commands() -> dict[str, Command]:
    """Return the `COMMANDS` of each extension that is installed and has some, by name."""
    found: dict[str, Command] = {}
    if _folder_exists(_FOLDER):
        for each in pkgutil.iter_modules(importlib.import_module(_FOLDER).__path__, f"{_FOLDER}."):
            found |= getattr(importlib.import_module(each.name), "COMMANDS", {})
    return found


def choose_advisor() -> Advisor:
    """Return the planner's advisor where the planner is installed, else the plain one."""
    if not _folder_exists(_PLANNER):
        return PlainAdvisor()
    advisor: Advisor = importlib.import_module(f"{_PLANNER}.advice").PlannerAdvisor()
    return advisor


def plan_of(words: Sequence[str]) -> dict[str, object]:
    """Return the content of plan.json for the words of a command line; see `digenrl.plan`.

    Raises:
        ExtensionMissing: the planner is not installed.
    """
    if not _folder_exists(_PLANNER):
        raise ExtensionMissing(
            f"digenrl.plan: needs {_PLANNER}, which this installation lacks; install it."
        )
    content: dict[str, Any] = importlib.import_module(f"{_PLANNER}.cli.plan").plan_of(words)
    return content


def _folder_exists(folder: str) -> bool:
    """Return whether `folder` has an `__init__.py`: a deleted one can leave a directory of stale
    bytecode behind."""
    try:
        spec = importlib.util.find_spec(folder)
    except ModuleNotFoundError:  # digenrl.extensions itself was deleted
        return False
    return spec is not None and spec.origin is not None
