"""Tiny builds: small random models of every family, for tests and first tries without downloads."""

from digenrl.cli.commands import Command

COMMANDS = {
    "tiny": Command(
        "digenrl.extensions.tiny.command",
        "build the tiny model of every family (made on first use otherwise)",
    ),
}
