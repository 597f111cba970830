"""Sweeps: a run for each combination of values, and one table of all."""
