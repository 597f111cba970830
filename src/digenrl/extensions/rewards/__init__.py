"""Rewards in separate processes and behind HTTP."""

from digenrl.cli.commands import Command
from digenrl.extensions.rewards.keys import ServeRewardKeys

COMMANDS = {
    "serve-reward": Command(
        "digenrl.extensions.rewards.cli.serve_reward", "serve a reward over HTTP"
    ),
}
SCHEMAS = {"serve_reward": ServeRewardKeys}
