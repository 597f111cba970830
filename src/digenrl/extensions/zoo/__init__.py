"""Model families beside FLUX, Stable Diffusion 3 and Wan."""
