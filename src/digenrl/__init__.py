"""digenrl: reinforcement-learning post-training of visual diffusion and flow models on unequal GPUs."""

__version__ = "0.2.0"
