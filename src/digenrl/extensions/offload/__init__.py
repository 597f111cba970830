"""Activations that wait in host memory for the backward pass."""
