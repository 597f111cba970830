"""One scorer per file; the protocol they follow is `digenrl.rewards.protocol`. Reached by Hydra `_target_`."""
