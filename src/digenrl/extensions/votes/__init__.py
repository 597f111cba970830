"""Votes of people as a reward: a page that shows pairs of samples, and scores from its votes."""

from digenrl.config.commands import Command

COMMANDS = {
    "vote": Command(
        "digenrl.extensions.votes.cli.vote",
        "address of the page on which people judge a run's samples: vote RUN",
        "run",
    ),
}
