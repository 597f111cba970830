"""docs/configuration.md, from the schema: `python -m scripts.configuration_reference FILE`."""

from __future__ import annotations

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
that you choose.
"""  # noqa: E501
_PAGES = {
    "train": "A run: `digenrl train`, `make train`",
    "plan": "A plan: `digenrl plan`, `make plan`",
    "score": "Scoring a folder: `digenrl score`, `make score`",
    "serve_reward": "A reward service: `digenrl serve-reward`, `make serve-reward`",
}


def page() -> str:
    """Return the whole document, in Markdown."""
    run = keys_of(schema_of("train"))
    parts = [_INTRODUCTION]
    for name, title in _PAGES.items():
        keys = keys_of(schema_of(name))
        if name == "plan":
            parts += [f"## {title}\n", "The keys of a run, and these.\n"]
            keys = {key: its for key, its in keys.items() if key not in run}
        else:
            parts += [f"## {title}\n"]
        parts += ["\n".join(_table(keys, defaults_of(name), marked=name == "train")), ""]
    return "\n".join(parts).rstrip() + "\n"


def _table(keys: Mapping[str, Key], defaults: Mapping[str, str], marked: bool) -> Iterator[str]:
    yield "| key | value | allowed | meaning |"
    yield "|---|---|---|---|"
    for key, its in keys.items():
        mark = " *" if marked and may_change(key) else ""
        value = f"`{defaults[key]}`" if defaults.get(key) else ""
        yield (
            f"| `{key}`{mark} | {value} | {its.allowed.replace('|', chr(92) + '|')} | "
            f"{its.meaning} |"
        )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
