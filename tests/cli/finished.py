"""What a run leaves behind, made without one."""

from __future__ import annotations

from pathlib import Path

import torch
from omegaconf import OmegaConf

from digenrl import config as configuration
from digenrl.strategy.checkpoint_io import DirectoryCheckpointIO


def finished_run(directory: Path, experiment: str) -> Path:
    """`directory` with config.yaml and, of RL step 7, a checkpoint whose adapter is not the initial
    one."""
    composed = configuration.load([f"experiment={experiment}"])
    (directory / "config.yaml").write_text(OmegaConf.to_yaml(composed.settings.tree))
    policy = composed.settings.build("model")
    module = composed.settings.build("algorithm", policy=policy)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.adapter.trained_parameters().values():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    checkpoint = {"epoch": 6, "state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)
    DirectoryCheckpointIO().save_checkpoint(checkpoint, directory / "checkpoints" / "step-000007")
    return directory
