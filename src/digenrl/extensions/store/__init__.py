"""Prompt store: conditionings of prompts on disk, for all ranks and later runs."""

from digenrl.cli.commands import Command

COMMANDS = {
    "encode": Command(
        "digenrl.extensions.store.cli.encode",
        "encode the prompts of a run into the prompt store",
    ),
}
