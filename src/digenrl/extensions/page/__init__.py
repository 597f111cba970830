"""The live page of a run."""

from digenrl.cli.commands import Command

COMMANDS = {
    "watch": Command(
        "digenrl.extensions.page.cli.watch",
        "a live page of a run, in a browser of this machine: watch RUN",
        "run",
    ),
}
