"""Roles, processes, and the movement of trajectories and weights between them."""
