"""Cheaper samples than the network's own (`sampling.lossy`), for methods whose loss never reads how
a sample was made."""

from digenrl.extensions.lossy.settings import lossy_problems

RULES = (lossy_problems,)
