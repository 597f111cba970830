"""Recorded trajectories, and training from them."""

from digenrl.cli.commands import Command
from digenrl.extensions.records.settings import replay_problems

COMMANDS = {
    "replay": Command(
        "digenrl.cli.train",
        "train again from a run's trajectories, with nothing generated: replay RUN",
        "replay",
    ),
}
RULES = (replay_problems,)
