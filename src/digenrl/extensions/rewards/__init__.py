"""Rewards in separate processes and behind HTTP."""

from digenrl.cli.commands import Command
from digenrl.extensions.rewards.keys import ServeRewardKeys
from digenrl.extensions.rewards.settings import judge_problems

COMMANDS = {
    "serve-reward": Command(
        "digenrl.extensions.rewards.cli.serve_reward", "serve a reward over HTTP"
    ),
}
SCHEMAS = {"serve_reward": ServeRewardKeys}
RULES = (judge_problems,)
"""Checks that rewards placed managed have the GPUs that they take."""
