"""Mistakes that a run would show late or never: arguments that a target does not take, and settings
without an effect."""

from digenrl.extensions.mistakes.arguments import argument_problems
from digenrl.extensions.mistakes.no_effect import without_effect

TARGET_RULES = (argument_problems,)
NOTES = (without_effect,)
