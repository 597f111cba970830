"""Flow-matching sampler as a Markov decision process: noise keys, sigma grids, transition kernels,
step plans, sampling, replay."""
