"""A block of a network whose forward is written here."""

from __future__ import annotations

from typing import Any

import torch


def through(network: Any, block: Any, *given: Any) -> Any:
    """Return `block(*given)`. The backward pass computes it again if the network checkpoints."""
    if torch.is_grad_enabled() and network.gradient_checkpointing:
        return network._gradient_checkpointing_func(block, *given)
    return block(*given)
