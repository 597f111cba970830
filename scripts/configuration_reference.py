"""docs/configuration.md, from the schema: `python -m scripts.configuration_reference FILE`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from digenrl.config.command_settings import schema_of
from digenrl.config.help_pages import defaults_of
from digenrl.config.settings import may_change
from digenrl.config.validation import Key, keys_of

_INTRODUCTION = """\
# Every key

Made from the schema (`src/digenrl/config/settings.py`) by `make docs`; `digenrl train --help` prints the same with the
options of each group. Values are those of the first run, where nothing else is said; an experiment, a hardware profile
and the command line change them; later ones win. Keys with * may change when a run is resumed. A component (`model`,
`algorithm`, `reward`, `logger`, `callbacks`) takes what its constructor takes, beside the keys here. `NAME` is a name
that you choose, `int` a whole number, `bool` true or false, `group` a group of keys.
`hardware.pools.NAME.efficiency.KEY` is `hardware.efficiency.KEY` of one pool.
"""  # noqa: E501
_PAGES = {
    "train": "A run: `digenrl train`, `make train`",
    "plan": "A plan: `digenrl plan`, `make plan`",
    "score": "Scoring a folder: `digenrl score`, `make score`",
    "serve_reward": "A reward service: `digenrl serve-reward`, `make serve-reward`",
}


_SHORT = {
    "whole numbers": "ints",
    "whole number": "int",
    "true or false": "bool",
    "a group of keys": "group",
}
_OF_ALL, _OF_POOL = "hardware.efficiency.", "hardware.pools.NAME.efficiency."


def page() -> str:
    """Return the whole document, in Markdown."""
    parts = [_INTRODUCTION]
    told: dict[str, tuple[str, Key]] = {}
    for name, title in _PAGES.items():
        parts += [f"## {title}\n"]
        keys, defaults = keys_of(schema_of(name)), defaults_of(name)
        rows = {key: (defaults.get(key, ""), its) for key, its in keys.items()}
        known = [key for key, row in rows.items() if told.get(key) == row]
        if name == "plan":
            parts += ["The keys of a run, and these.\n"]
        elif known:
            parts += [f"As above: {', '.join(f'`{key}`' for key in known)}. Beside them:\n"]
        new = {key: row for key, row in rows.items() if key not in known}
        parts += ["\n".join(_listed(new, grouped=name == "train")), ""]
        told |= new
    return "\n".join(parts).rstrip() + "\n"


def _listed(rows: Mapping[str, tuple[str, Key]], grouped: bool) -> Iterator[str]:
    """Yield the lines of a list, `grouped` with a heading above each group of keys and a mark on
    what a resumed run may change. A pool's efficiencies are left out where they mean what the
    hardware's do."""
    groups: dict[str, list[str]] = {}
    for key, (default, its) in rows.items():
        twin = rows.get(key.replace(_OF_POOL, _OF_ALL)) if key.startswith(_OF_POOL) else None
        if twin and (twin[1].allowed, twin[1].meaning) == (its.allowed, its.meaning):
            continue
        allowed = re.sub(r">= (\S+) and <= (\S+)", r"\1 .. \2", its.allowed)
        for long, short in _SHORT.items():
            allowed = allowed.replace(long, short)
        allowed = re.sub(r"\b_[a-z]+_(=\w+)?", r"`\g<0>`", allowed)  # or Markdown slants it
        mark = " *" if grouped and may_change(key) else ""
        value = f" = `{default}`" if default else ""
        group = key.partition(".")[0] if grouped and "." in key else ""
        line = f"- **`{key}`**{mark}{value} ({allowed}): {its.meaning}"
        groups.setdefault(group, []).append(line)
    yield from groups.pop("", [])
    for group, lines in groups.items():
        yield f"\n### `{group}`\n"
        yield from lines


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
