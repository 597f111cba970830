"""Scouts: cheap trial samples choose the initial noises that a task generates from."""

from digenrl.extensions.scouts.settings import scout_problems

RULES = (scout_problems,)
