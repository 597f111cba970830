"""Other ways to send weights and trajectories than plain sockets: deltas and packing over thin
lines, broadcasts."""

from digenrl.extensions.links.settings import publication_problems

RULES = (publication_problems,)
