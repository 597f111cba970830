"""Parts of a run by hand: digenrl from Python, RL steps in this process, an evaluation again."""

from digenrl.cli.commands import Command

COMMANDS = {
    "eval": Command(
        "digenrl.extensions.workbench.cli.evaluate",
        "evaluate a run's model again, with other prompts, steps or rewards: eval RUN",
        "run",
    ),
}
