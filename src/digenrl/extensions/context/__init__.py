"""Trainers that share the tokens of a forward (`parallel.context`): long videos."""

from digenrl.extensions.context.settings import context_problems

RULES = (context_problems,)
