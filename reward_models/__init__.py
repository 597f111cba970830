"""One scorer per file, named by Hydra `_target_`. `digenrl.rewards.protocol` is the protocol of
scorers."""
