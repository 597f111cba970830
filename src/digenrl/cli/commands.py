"""The table of commands: those of this package, and those that extensions bring."""

from __future__ import annotations

from digenrl.cli.extensions import offered_commands
from digenrl.config.commands import Command

OWN: dict[str, Command] = {
    "train": Command(
        "digenrl.cli.train", "train: experiment=NAME hardware=NAME key=value; -m sweeps"
    ),
    "resume": Command(
        "digenrl.cli.train", "continue a run from its last checkpoint: resume RUN", "resume"
    ),
    "join": Command(
        "digenrl.cli.join", "add one rollout to a running run, from any machine: join RUN", "run"
    ),
    "eval": Command(
        "digenrl.cli.evaluate",
        "evaluate a run's model again, with other prompts, steps or rewards: eval RUN",
        "run",
    ),
    "report": Command(
        "digenrl.cli.report", "rebuild summary, pictures and report of a run: report RUN", "run"
    ),
    "serve-reward": Command("digenrl.cli.serve_reward", "serve a reward over HTTP"),
}


def all_commands() -> dict[str, Command]:
    """Return every command by name: those of this package, then those of each extension."""
    return OWN | offered_commands()
