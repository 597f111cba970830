"""A block of a network whose forward is written here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from diffusers import ModelMixin

Output = TypeVar("Output")


def run_block(network: ModelMixin, block: Callable[..., Output], *given: object) -> Output:
    """Return `block(*given)`. The backward pass computes it again if the network checkpoints."""
    if torch.is_grad_enabled() and network.gradient_checkpointing:
        output: Output = network._gradient_checkpointing_func(block, *given)
        return output
    return block(*given)
