"""Losses and LightningModules. They see tensors, blocks and a policy; never ranks, stores or
processes."""
