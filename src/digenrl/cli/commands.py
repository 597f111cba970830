"""The table of commands: the core's, and those that extensions bring."""

from __future__ import annotations

from dataclasses import dataclass

from digenrl.extension import offered


@dataclass(frozen=True)
class Command:
    """One command of `digenrl`."""

    module: str
    """Module whose `main(words)` runs the command."""
    does: str
    """One line for the list of commands."""
    run_key: str | None = None
    """Key for the command's first bare word; None: the command takes `key=value` words only."""
    run_required: bool = True
    """Whether a command with a `run_key` refuses to start without a run."""


CORE: dict[str, Command] = {
    "train": Command(
        "digenrl.cli.train", "train: experiment=NAME hardware=NAME key=value; -m sweeps"
    ),
    "resume": Command(
        "digenrl.cli.train", "continue a run from its last checkpoint: resume RUN", "resume"
    ),
    "report": Command(
        "digenrl.cli.report", "rebuild summary, pictures and report of a run: report RUN", "run"
    ),
}


def commands() -> dict[str, Command]:
    """Return every command by name: the core's, then the `COMMANDS` of each extension that is
    installed."""
    found = dict(CORE)
    for more in offered("COMMANDS"):
        found |= more
    return found
