"""Launchers beside this machine, torchrun and SLURM."""
