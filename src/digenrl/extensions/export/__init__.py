"""Trained weights in the layouts of other tools."""

from digenrl.config.commands import Command

COMMANDS = {
    "export": Command(
        "digenrl.extensions.export.cli.export",
        "write a run's trained weights as diffusers reads them: export RUN",
        "run",
    ),
}
