"""Other ways to send weights and trajectories than plain sockets: deltas and packing over thin
lines, broadcasts."""

from digenrl.extensions.links.settings import line_problems, publication_problems

RULES = (publication_problems, line_problems)
