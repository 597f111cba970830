"""Rewards in separate processes and behind HTTP."""

from digenrl.cli.commands import Command

COMMANDS = {
    "serve-reward": Command(
        "digenrl.extensions.rewards.cli.serve_reward", "serve a reward over HTTP"
    ),
}
