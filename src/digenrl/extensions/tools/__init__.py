"""Commands around a run: skeletons of your own parts, downloads, a check of this machine."""

from digenrl.config.commands import Command

COMMANDS = {
    "check": Command(
        "digenrl.extensions.tools.cli.check",
        "check this machine, or what a run lacks here: check experiment=NAME hardware=NAME",
    ),
    "list": Command(
        "digenrl.extensions.tools.cli.list",
        "the options of each group, or of one with what each is: list experiment",
    ),
    "fetch": Command(
        "digenrl.extensions.tools.cli.fetch",
        "download what an experiment needs: experiment=NAME [prompts=SET]; list=true only says it",
    ),
    "new": Command(
        "digenrl.extensions.tools.cli.new",
        "write a working skeleton with its test: new reward|model|hardware|experiment NAME",
    ),
}
