"""Algorithms on the forward process: DiffusionNFT and online Diffusion-DPO."""
