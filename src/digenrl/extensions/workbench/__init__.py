"""Parts of a run by hand: RL steps in this process, an evaluation again, prompts encoded ahead."""

from digenrl.cli.commands import Command

COMMANDS = {
    "eval": Command(
        "digenrl.extensions.workbench.cli.evaluate",
        "evaluate a run's model again, with other prompts, steps or rewards: eval RUN",
        "run",
    ),
    "encode": Command(
        "digenrl.extensions.workbench.cli.encode",
        "encode the prompts of a run into the prompt store",
    ),
}
