"""A copy of the tree without an extension: what is left must work (I18)."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
EXTENSIONS = sorted(
    path.parent.name for path in (ROOT / "src/digenrl/extensions").glob("*/__init__.py")
)


def installed(name: str) -> bool:
    """Return whether the extension `name` is there."""
    return name in EXTENSIONS


def copy_without(names: tuple[str, ...], to: Path) -> Path:
    """Copy every file of the tree to `to`, without the extensions `names`, their tests and their
    configs.

    A config goes when its `_target_` lies in a deleted extension, and when its defaults choose a
    config that went.
    """
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    gone = tuple(
        f"{folder}/extensions/{name}/" for name in names for folder in ("src/digenrl", "tests")
    )
    files = [
        name
        for name in listed.stdout.splitlines()
        if (ROOT / name).is_file() and not name.startswith(gone)
    ]
    lost = _configs_lost(names) if names else set[str]()
    for name in files:
        if name not in lost:
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, to / name)
    subprocess.run(
        ["git", "init", "--quiet"], cwd=to, check=True
    )  # some tests ask git for the files
    subprocess.run(["git", "add", "--all"], cwd=to, check=True)
    return to


def _configs_lost(names: tuple[str, ...]) -> set[str]:
    """Paths of the configs that need a deleted extension."""
    naming = re.compile(rf"_target_: digenrl\.extensions\.({'|'.join(names)})\b")
    texts = {
        str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "configs").rglob("*.yaml")
    }
    lost = {path for path, text in texts.items() if naming.search(text)}
    while more := {
        path for path, text in texts.items() if path not in lost and _chosen(path, text) & lost
    }:
        lost |= more
    return lost - {"configs/train.yaml"}  # the first run is a choice of the defaults, and stays one


def _chosen(path: str, text: str) -> set[str]:
    """Paths of the configs that the defaults list of one config chooses."""
    found = set()
    for entry in (yaml.safe_load(text) or {}).get("defaults", []):
        choices = entry.items() if isinstance(entry, dict) else [("", entry)]
        for group, option in choices:
            folder = (
                str(group).removeprefix("override ").split("@")[0].strip("/")
                or Path(path).parent.name
            )
            found.add(f"configs/{folder}/{str(option).lstrip('/')}.yaml")
    return found
