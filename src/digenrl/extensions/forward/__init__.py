"""Algorithms on the forward process: DiffusionNFT, online Diffusion-DPO, and on samples from files
supervised fine-tuning and offline Diffusion-DPO."""

from digenrl.extensions.forward.settings import file_problems

RULES = (file_problems,)
